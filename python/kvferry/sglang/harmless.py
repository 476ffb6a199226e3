"""Arguments of SGLang on which no byte of a page depends, beyond the rounding of batches of another size.

All others separate engines: an argument that is unknown here costs hits, and never a wrong page.
"""

#: Named in another way: the weights by their files, adapters by namespaces of their own, and this linker's settings.
_ELSEWHERE = """
    model_path revision download_dir tokenizer_path enable_lora lora_paths max_lora_rank lora_target_modules
    unified_cache_external_linker_config
"""

_TOKENS_AND_TEXT = """
    tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num skip_tokenizer_init
    enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
    enable_tokenizer_batch_encode disable_tokenizer_batch_decode chat_template trust_request_chat_template
    hf_chat_template_name completion_template reasoning_parser default_chat_template_kwargs strip_thinking_cache
    enable_strict_thinking tool_call_parser tool_server sampling_defaults preferred_sampling_params
    allow_auto_truncate stream_interval batch_notify_size stream_response_default_include_usage
    incremental_streaming_output enable_streaming_session return_input_ids return_output_ids enable_cache_report
    constrained_json_whitespace_pattern constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
    sampling_backend grammar_backend mlx_enable_sampling random_seed enable_custom_logit_processor
    sampling_mask_max_tokens disable_outlines_disk_cache enable_response_store asr_max_buffer_seconds
    asr_max_concurrent_sessions
"""

_SCHEDULING = """
    mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
    prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens
    prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
    default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
    priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness radix_eviction_policy
    radix_eviction_policy_config _radix_eviction_policy_explicitly_set disable_radix_cache radix_cache_backend
    enable_session_radix_cache disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval
    enable_mixed_chunk load_balance_method enable_prefill_delayer prefill_delayer_max_delay_passes
    prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
    prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
    min_free_slots_delay num_reserved_decode_tokens max_loaded_loras max_loras_per_batch lora_eviction_policy
    lora_drain_wait_threshold enable_lora_overlap_loading
"""

_CACHES_AND_TRANSFERS = """
    enable_hierarchical_cache hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio hicache_size
    hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
    hicache_storage_prefetch_policy hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
    hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
    unified_cache_external_linker_backend enable_linker_mla_dedup kv_canary kv_canary_real_data
    kv_canary_sweep_interval disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
    disaggregation_ib_device disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
    disaggregation_decode_retraction_backup disaggregation_decode_extra_slots
    disaggregation_decode_polling_interval disaggregation_enable_kv_checksum
    disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy optimistic_prefill_attempts
    mooncake_ib_device
"""

_PROCESSES = """
    nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank base_gpu_id gpu_id_step numa_node
    watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler gc_threshold
    enable_p2p_check pre_warm_nccl host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port
    grpc_worker_threads grpc_response_timeout_secs sidecar sidecar_args skip_server_warmup warmups enable_http2
    http2_max_concurrent_streams http2_initial_connection_window_size enable_http_worker_reuseport ssl_keyfile
    ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
    file_storage_path encoder_urls encoder_bootstrap_port encoder_register_urls engine_info_bootstrap_port
    decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints spec_trace_dir weight_cache_socket
    weight_cache_timeout weight_loader_disable_mmap weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load delete_ckpt_after_loading
    remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports
    checkpoint_engine_wait_weights_before_ready enable_memory_saver enable_weights_cpu_backup
    enable_draft_weights_cpu_backup mm_processor_worker_num mm_io_worker_num allowed_media_domains
    media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request
"""

_LOGS_AND_METRICS = """
    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
    enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
    tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
    bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
    generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
    kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
    forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
    export_metrics_to_file export_metrics_to_file_dir stat_loggers expert_distribution_recorder_mode
    expert_distribution_recorder_buffer_size expert_balancedness_report_mode enable_layerwise_nvtx_marker
    modelopt_checkpoint_save_path modelopt_export_path debug_tensor_dump_output_folder
    debug_tensor_dump_layers enable_return_hidden_states return_hidden_states_mode
    enable_return_routed_experts enable_return_indexer_topk enable_return_aux_hidden_states
"""

#: Captured graphs compute what the same kernels compute without them, with other sizes of batches.
_GRAPHS = """
    cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
    cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context
    cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
    disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph torch_compile_max_bs
"""

HARMLESS = frozenset(
    " ".join(
        (_ELSEWHERE, _TOKENS_AND_TEXT, _SCHEDULING, _CACHES_AND_TRANSFERS, _PROCESSES, _LOGS_AND_METRICS, _GRAPHS)
    ).split()
)
