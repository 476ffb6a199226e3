use super::*;

/// A temporary folder, removed on drop.
struct Toml(tempfile::TempDir);

impl Toml {
    fn new(text: &str) -> Self {
        let folder = Self(tempfile::tempdir().expect("a folder"));
        std::fs::write(folder.path(), text).expect("a file");
        folder
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("kvferry.toml")
    }

    fn load(&self) -> Result<Config, ConfigError> {
        Config::load_with(Some(&self.path()), [], &Flags::default())
    }
}

fn environment(variables: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    variables
        .iter()
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

fn load_environment(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    Config::load_with(None, environment(variables), &Flags::default())
}

fn message(result: Result<Config, ConfigError>) -> String {
    let message = result.expect_err("a bad configuration").to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

#[test]
fn defaults_are_those_of_the_docs() {
    let config = load_environment(&[("XDG_RUNTIME_DIR", "/run/user/7")]).expect("defaults");
    let expected = Config {
        socket_dir: "/run/user/7/kvferry".into(),
        ranks: 1,
        kv_shards: Sharding::each(1),
        replicas: 1,
        ratio: Ratio::default(),
        g2: ByteSize(8 << 30),
        g2_lock: false,
        g2_numa: NumaNodes::default(),
        g2_policy: TierPolicy::default(),
        g3: ByteSize(0),
        g3_dir: Directories::default(),
        g3_policy: TierPolicy::evict_first(),
        g3_depth: 16,
        g3_io: DiskIo::Auto,
        g3_scrub_bytes_per_s: ByteSize(8 << 20),
        g3_discard: false,
        prefill_tokens_per_s: 0,
        copy_threads: 4,
        store_bytes_per_s: ByteSize(0),
        gpu_copy: GpuCopy::Batch,
        heartbeat_ms: 1_000,
        wire_max: 2,
        users: UserList::default(),
        namespaces: PathBuf::new(),
        monitor: MonitorAddress(None),
        page_index: false,
        record_decisions: false,
        flush_limit_s: 10,
        log: "info".to_owned(),
    };
    assert_eq!(config, expected);
}

#[test]
fn without_a_runtime_directory_sockets_are_in_tmp_under_the_user_id() {
    let uid = rustix::process::getuid().as_raw();
    for variables in [
        &[][..],
        &[("XDG_RUNTIME_DIR", "")],
        &[("XDG_RUNTIME_DIR", "run")],
    ] {
        let config = load_environment(variables).expect("defaults");
        assert_eq!(
            config.socket_dir,
            PathBuf::from(format!("/tmp/kvferry-{uid}"))
        );
    }
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let toml = Toml::new("ratio = 1\nranks = 2\ng2 = \"3GiB\"\nlog = 'warn'\n");
    let variables = environment(&[("KVFERRY_RANKS", "4"), ("KVFERRY_G2", " 5 MiB ")]);
    let flags = Flags {
        g2: Some(TierSize::Bytes(ByteSize(6))),
        ..Flags::default()
    };
    let config = Config::load_with(Some(&toml.path()), variables, &flags).expect("good");
    assert_eq!(
        (config.ratio.pages(), config.ranks, config.g2),
        (1, 4, ByteSize(6))
    );
    assert_eq!((config.log.as_str(), config.copy_threads), ("warn", 4));
}

#[test]
fn tiers_can_be_given_in_pages_of_every_shard() {
    let toml =
        Toml::new("ranks = 2\ng2 = '1000x2MiB'\ng3 = '4000x2MiB'\ng3_dir = '/d,/e'\nratio = 8\n");
    let config = Config::load_with(Some(&toml.path()), Vec::new(), &Flags::default());
    let config = config.expect("good");
    assert_eq!(
        config.g2.0,
        2 * kvferry_memory::Depot::bytes_for(1000, 2 << 20)
    );
    let pages = 2 * 4000_u64 * (2 << 20);
    assert!(
        (pages..pages + pages / 20).contains(&config.g3.0),
        "{}",
        config.g3.0
    );
}

#[test]
fn every_key_can_be_given_by_every_source() {
    let expected = Config {
        socket_dir: "/x".into(),
        ranks: 2,
        kv_shards: Sharding::new(2, 1).expect("divides"),
        replicas: 3,
        ratio: Ratio::new(8).expect("in bounds"),
        g2: ByteSize(4_096),
        g2_lock: true,
        g2_numa: "1,0".parse().expect("nodes"),
        g2_policy: TierPolicy::evict_first(),
        g3: ByteSize(1 << 30),
        g3_dir: Directories(vec!["/d".into(), "/e".into()]),
        g3_policy: TierPolicy::default(),
        g3_depth: 4,
        g3_io: DiskIo::Threads,
        g3_scrub_bytes_per_s: ByteSize(0),
        g3_discard: true,
        prefill_tokens_per_s: 9_000,
        copy_threads: 3,
        store_bytes_per_s: ByteSize(2 << 30),
        gpu_copy: GpuCopy::Async,
        heartbeat_ms: 50,
        wire_max: 1,
        users: "1002,1001".parse().expect("ids"),
        namespaces: PathBuf::from("/n"),
        monitor: "0.0.0.0:9464".parse().expect("an address"),
        page_index: true,
        record_decisions: true,
        flush_limit_s: 60,
        log: "1".to_owned(),
    };
    let toml = Toml::new(
        "socket_dir = '/x'\nranks = 2\nkv_shards = 1\nreplicas = 3\nratio = 8\ng2 = 4096\ng2_lock = true\n\
         g2_numa = '1,0'\ng2_policy = 'pieces=0'\ng3 = '1GiB'\ng3_dir = '/d,/e'\n\
         g3_policy = 'pieces=2'\ng3_depth = 4\ng3_io = 'threads'\ng3_scrub_bytes_per_s = '0'\ng3_discard = true\nprefill_tokens_per_s = 9000\ncopy_threads = 3\nstore_bytes_per_s = '2GiB'\n\
         gpu_copy = 'async'\n\
         heartbeat_ms = 50\nwire_max = 1\nusers = '1001,1002'\nnamespaces = '/n'\nmonitor = '0.0.0.0:9464'\npage_index = true\nrecord_decisions = true\nflush_limit_s = 60\nlog = '1'",
    );
    assert_eq!(toml.load().expect("file"), expected);
    let variables = [
        ("KVFERRY_SOCKET_DIR", "/x"),
        ("KVFERRY_RANKS", "2"),
        ("KVFERRY_KV_SHARDS", "1"),
        ("KVFERRY_REPLICAS", "3"),
        ("KVFERRY_RATIO", "8"),
        ("KVFERRY_G2", "4096"),
        ("KVFERRY_G2_LOCK", "true"),
        ("KVFERRY_G2_NUMA", "1,0"),
        ("KVFERRY_G2_POLICY", "pieces=0"),
        ("KVFERRY_G3", "1GiB"),
        ("KVFERRY_G3_DIR", "/d,/e"),
        ("KVFERRY_G3_POLICY", "pieces=2"),
        ("KVFERRY_G3_DEPTH", "4"),
        ("KVFERRY_G3_IO", "threads"),
        ("KVFERRY_G3_SCRUB_BYTES_PER_S", "0"),
        ("KVFERRY_G3_DISCARD", "true"),
        ("KVFERRY_PREFILL_TOKENS_PER_S", "9000"),
        ("KVFERRY_COPY_THREADS", "3"),
        ("KVFERRY_STORE_BYTES_PER_S", "2GiB"),
        ("KVFERRY_GPU_COPY", "async"),
        ("KVFERRY_HEARTBEAT_MS", "50"),
        ("KVFERRY_WIRE_MAX", "1"),
        ("KVFERRY_USERS", "1001,1002"),
        ("KVFERRY_NAMESPACES", "/n"),
        ("KVFERRY_MONITOR", "0.0.0.0:9464"),
        ("KVFERRY_PAGE_INDEX", "true"),
        ("KVFERRY_RECORD_DECISIONS", "true"),
        ("KVFERRY_FLUSH_LIMIT_S", "60"),
        ("KVFERRY_LOG", "1"),
    ];
    assert_eq!(load_environment(&variables).expect("environment"), expected);
    let flags = Flags {
        socket_dir: Some("/x".into()),
        ranks: Some(2),
        kv_shards: Some(1),
        replicas: Some(3),
        ratio: Some(8),
        g2: Some(TierSize::Bytes(ByteSize(4_096))),
        g2_lock: Some(true),
        g2_numa: Some("1,0".parse().expect("nodes")),
        g2_policy: Some("pieces=0".to_owned()),
        g3: Some(TierSize::Bytes(ByteSize(1 << 30))),
        g3_dir: Some(Directories(vec!["/d".into(), "/e".into()])),
        g3_policy: Some("pieces=2".to_owned()),
        g3_depth: Some(4),
        g3_io: Some("threads".to_owned()),
        g3_scrub_bytes_per_s: Some(ByteSize(0)),
        g3_discard: Some(true),
        prefill_tokens_per_s: Some(9_000),
        copy_threads: Some(3),
        store_bytes_per_s: Some(ByteSize(2 << 30)),
        gpu_copy: Some(GpuCopy::Async),
        heartbeat_ms: Some(50),
        wire_max: Some(1),
        users: Some("1001,1002".to_owned()),
        namespaces: Some(PathBuf::from("/n")),
        monitor: Some("0.0.0.0:9464".to_owned()),
        page_index: Some(true),
        record_decisions: Some(true),
        flush_limit_s: Some(60),
        log: Some("1".to_owned()),
    };
    assert_eq!(
        Config::load_with(None, [], &flags).expect("flags"),
        expected
    );
}

#[test]
fn unknown_keys_are_refused_with_a_suggestion_and_their_source() {
    let error = message(Toml::new("ratoi = 3").load());
    assert!(
        error.ends_with("kvferry.toml: unknown key 'ratoi': did you mean 'ratio'?"),
        "{error}"
    );
    let error = message(Toml::new("[ranks_]\na = 1").load());
    assert!(
        error.ends_with("unknown key 'ranks_': did you mean 'ranks'?"),
        "{error}"
    );
    let error = message(Toml::new("heartbeat-ms = 1").load());
    assert!(error.ends_with("did you mean 'heartbeat_ms'?"), "{error}");
    let error = message(Toml::new("zzz = 3").load());
    assert!(
        error.ends_with(
            "unknown key 'zzz': the keys are socket_dir, ranks, kv_shards, replicas, ratio, g2, \
        g2_lock, g2_numa, g2_policy, g3, g3_dir, g3_policy, g3_depth, g3_io, g3_scrub_bytes_per_s, g3_discard, \
        prefill_tokens_per_s, copy_threads, store_bytes_per_s, gpu_copy, heartbeat_ms, wire_max, users, namespaces, monitor, \
        page_index, record_decisions, flush_limit_s, log"
        ),
        "{error}"
    );
    let expected = "environment: unknown key 'KVFERRY_RATIOS': did you mean 'KVFERRY_RATIO'?";
    assert_eq!(
        message(load_environment(&[("KVFERRY_RATIOS", "3")])),
        expected
    );
    let error = message(load_environment(&[("KVFERRY_ratio", "3")]));
    assert!(error.ends_with("did you mean 'KVFERRY_RATIO'?"), "{error}");
}

#[test]
fn variables_that_are_no_settings_are_ignored() {
    let variables = [("KVFERRY_SHARED", "/x"), ("RATIO", "no"), ("KVFERRY", "z")];
    assert!(load_environment(&variables).is_ok());
}

/// A kubelet sets these in every container of a namespace that has a Service with such a name.
#[test]
fn variables_of_a_service_named_kvferry_are_no_settings() {
    let links = [
        ("KVFERRY_SERVICE_HOST", "10.0.0.1"),
        ("KVFERRY_SERVICE_PORT", "9464"),
        ("KVFERRY_SERVICE_PORT_METRICS", "9464"),
        ("KVFERRY_PORT", "tcp://10.0.0.1:9464"),
        ("KVFERRY_PORT_9464_TCP", "tcp://10.0.0.1:9464"),
        ("KVFERRY_PORT_9464_TCP_PROTO", "tcp"),
        ("KVFERRY_PORT_9464_TCP_PORT", "9464"),
        ("KVFERRY_PORT_9464_TCP_ADDR", "10.0.0.1"),
        ("KVFERRY_METRICS_SERVICE_HOST", "10.0.0.2"),
        ("KVFERRY_METRICS_PORT", "tcp://10.0.0.2:80"),
        ("KVFERRY_TRTLLM_MODE", "load"),
    ];
    let config = load_environment(&[&links[..], &[("KVFERRY_RANKS", "3")]].concat());
    assert_eq!(config.expect("settings").ranks, 3);
    let error = message(load_environment(&[("KVFERRY_MONITOR_PORT", "9464")]));
    let expected = "unknown key 'KVFERRY_MONITOR_PORT': did you mean 'KVFERRY_MONITOR'?";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn bad_values_name_key_value_source_and_what_is_expected() {
    let cases = [
        (
            "ranks = 0",
            "'ranks' is 0: expected a whole number from 1 to 64",
        ),
        ("ranks = 65", "'ranks' is 65: expected"),
        (
            "ranks = 70000",
            "'ranks' is 70000: expected a whole number from 1 to 64",
        ),
        ("ranks = -1", "'ranks' is -1: expected"),
        ("ranks = '2'", "'ranks' is \"2\": expected"),
        ("ranks = [1]", "'ranks' is [1]: expected"),
        (
            "ratio = 257",
            "'ratio' is 257: expected a whole number from 1 to 256",
        ),
        ("ratio = 1.5", "'ratio' is 1.5: expected"),
        ("ratio = true", "'ratio' is true: expected"),
        (
            "g2 = 0",
            "'g2' is 0: expected a size above 0, such as \"8GiB\"",
        ),
        ("g2 = '8 apples'", "'g2' is \"8 apples\": expected a size"),
        ("g2 = '7x0'", "'g2' is \"7x0\": expected a size"),
        (
            "g2 = '0x2MiB'",
            "'g2' is \"0x2MiB\": expected a size above 0, such as \"8GiB\"",
        ),
        (
            "copy_threads = 0",
            "'copy_threads' is 0: expected a whole number from 1 to 256",
        ),
        (
            "store_bytes_per_s = 1",
            "'store_bytes_per_s' is 1: expected 0 for no limit, or a size of at least 1MiB, such as \"2GiB\"",
        ),
        (
            "store_bytes_per_s = '1023KiB'",
            "'store_bytes_per_s' is \"1023KiB\": expected 0 for no limit",
        ),
        (
            "store_bytes_per_s = -1",
            "'store_bytes_per_s' is -1: expected 0 for no limit",
        ),
        (
            "heartbeat_ms = 9",
            "'heartbeat_ms' is 9: expected a whole number from 10 to 60000",
        ),
        (
            "wire_max = 3",
            "'wire_max' is 3: expected a whole number from 1 to 2",
        ),
        ("log = 1", "'log' is 1: expected a filter"),
        (
            "socket_dir = 'run'",
            "'socket_dir' is \"run\": expected an absolute path of at most 80",
        ),
        ("[socket_dir]\na = 1", "'socket_dir' is {\"a\":1}: expected"),
    ];
    for (text, expected) in cases {
        let error = message(Toml::new(text).load());
        assert!(
            error.contains(&format!("kvferry.toml: {expected}")),
            "{error}"
        );
    }
    let long = format!("/{}", "x".repeat(SOCKET_DIR_BYTES_MAX));
    let error = message(Toml::new(&format!("socket_dir = '{long}{long}'")).load());
    let bytes = 2 * long.len();
    let expected =
        format!("xxx...\": expected an absolute path of at most 80 bytes, and it has {bytes}");
    assert!(error.contains(&expected), "{error}");
    assert!(error.contains("--socket-dir"), "{error}");
    let runtime = format!("/{}", "r".repeat(90));
    let error = message(load_environment(&[("XDG_RUNTIME_DIR", &runtime)]));
    assert!(
        error.starts_with("default, from XDG_RUNTIME_DIR: 'socket_dir' is "),
        "{error}"
    );
    let error = message(load_environment(&[("KVFERRY_RATIO", "many")]));
    assert_eq!(
        error,
        "environment variable KVFERRY_RATIO: 'ratio' is \"many\": expected a whole \
        number from 1 to 256"
    );
    let flags = Flags {
        ranks: Some(0),
        ..Flags::default()
    };
    let error = message(Config::load_with(None, [], &flags));
    assert_eq!(
        error,
        "--ranks: 'ranks' is 0: expected a whole number from 1 to 64"
    );
    let flags = Flags {
        copy_threads: Some(0),
        ..Flags::default()
    };
    assert!(message(Config::load_with(None, [], &flags)).starts_with("--copy-threads: "));
}

#[test]
fn directories_of_the_disk_are_needed_with_g3_rejected_without_it_and_lie_beside_each_other() {
    let cases = [
        (
            "g3 = '1GiB'",
            "kvferry.toml: 'g3' is \"1GiB\": expected 0, or g3_dir beside it, the directory of the blocks: give --g3-dir DIR",
        ),
        (
            "g3_dir = '/d'",
            "kvferry.toml: 'g3_dir' is \"/d\": expected no directory, because g3 is 0, and nothing would be kept there: \
             give --g3 SIZE, or leave g3_dir out",
        ),
        (
            "g3 = '1GiB'\ng3_dir = '/d,/e,/d'",
            "expected each directory once, and /d is named twice: leave one out",
        ),
        (
            "g3 = '1GiB'\ng3_dir = '/d/e,/f,/d/'",
            "expected directories beside each other, and /d/e lies in /d/: name another one",
        ),
        (
            "g3 = '1GiB'\ng3_dir = '/d,/d/f/../e'",
            "and /d/f/../e lies in /d: name another one",
        ),
    ];
    for (text, expected) in cases {
        let error = message(Toml::new(text).load());
        assert!(error.contains(expected), "{error}");
    }
    for text in [
        "g3 = '1GiB'\ng3_dir = '/d,/de'",
        "g3 = '1GiB'\ng3_dir = '/d/a,/d/b'",
        "g3_dir = ''",
    ] {
        assert!(Toml::new(text).load().is_ok(), "{text}");
    }
}

#[test]
fn a_value_without_quotes_is_refused_with_the_quotes() {
    for (text, remedy) in [
        (
            "ranks = 2\n  g2 = 8GiB # much",
            "line 2, `g2 = 8GiB # much`: ",
        ),
        ("g2 = 8GiB", ": write g2 = \"8GiB\""),
        ("socket_dir = /run/kvf", ": write socket_dir = \"/run/kvf\""),
    ] {
        let error = message(Toml::new(text).load());
        assert!(error.contains(remedy), "{error}");
    }
    for text in ["ranks = two", "g2 = \"8GiB", "g9 = x"] {
        let error = message(Toml::new(text).load());
        assert!(!error.contains("write"), "{error}");
    }
}

#[test]
fn lists_of_a_file_are_lists_of_toml_or_texts() {
    let toml =
        Toml::new("users = [1002, 1001]\ng3 = '1GiB'\ng3_dir = ['/d', '/e']\ng2_numa = [1, 0]");
    let config = toml.load().expect("good");
    let directories = Directories(vec!["/d".into(), "/e".into()]);
    assert_eq!(config.users.to_string(), "1001,1002");
    assert_eq!(config.g3_dir, directories);
    assert_eq!(config.g2_numa, "1,0".parse().expect("nodes"));
    assert!(Toml::new("users = []\ng3_dir = []").load().is_ok());
    for (text, words) in [
        (
            "users = ['alice']",
            "'users' is \"alice\": expected at most 16 user ids",
        ),
        ("users = [1.5]", "'users' is [1.5]: expected"),
        (
            "g3 = '1GiB'\ng3_dir = ['/x/a,b']",
            "'g3_dir' is [\"/x/a,b\"]: expected absolute paths without commas",
        ),
        ("ranks = [1]", "'ranks' is [1]: expected"),
    ] {
        let error = message(Toml::new(text).load());
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_file_that_is_missing_broken_or_huge_is_refused() {
    let toml = Toml::new("ratio = \nranks = 1");
    let error = message(toml.load());
    assert!(
        error.contains("kvferry.toml: not TOML: line 1, `ratio =`: "),
        "{error}"
    );
    let error = message(Toml::new(&"#".repeat(CONFIG_BYTES_MAX as usize + 1)).load());
    assert!(error.ends_with("at most 1048576 bytes"), "{error}");
    let missing = toml.0.path().join("none.toml");
    let error = message(Config::load_with(Some(&missing), [], &Flags::default()));
    assert!(
        error.contains("none.toml: cannot read this configuration"),
        "{error}"
    );
    assert!(Toml::new("").load().is_ok());
}

#[test]
fn values_that_are_not_utf_8_are_refused_by_name() {
    use std::os::unix::ffi::OsStringExt;
    let value = OsString::from_vec(vec![0xff]);
    let error = message(Config::load_with(
        None,
        [("KVFERRY_LOG".into(), value.clone())],
        &Flags::default(),
    ));
    assert_eq!(
        error,
        "environment variable KVFERRY_LOG: the value is not UTF-8"
    );
    let flags = Flags {
        socket_dir: Some(value.into()),
        ..Flags::default()
    };
    let error = message(Config::load_with(None, [], &flags));
    assert_eq!(error, "--socket-dir: the value is not UTF-8");
}

#[test]
fn flags_are_a_part_of_any_command_line() {
    use clap::{Args, FromArgMatches};
    let command = Flags::augment_args(clap::Command::new("kvferry"));
    command.clone().debug_assert();
    let words = [
        "kvferry",
        "--g2",
        "1.5GiB",
        "--heartbeat-ms=20",
        "--socket-dir",
        "/x",
    ];
    let matches = command.clone().try_get_matches_from(words).expect("flags");
    let expected = Flags {
        g2: Some(TierSize::Bytes(ByteSize(3 << 29))),
        heartbeat_ms: Some(20),
        socket_dir: Some("/x".into()),
        ..Flags::default()
    };
    assert_eq!(Flags::from_arg_matches(&matches).expect("flags"), expected);
    assert!(
        command
            .try_get_matches_from(["kvferry", "--g2", "much"])
            .is_err()
    );
}

#[test]
fn every_field_is_a_key_and_every_key_a_field() {
    let config = load_environment(&[]).expect("defaults");
    let json = serde_json::to_value(&config).expect("plain data");
    let fields: std::collections::BTreeSet<_> =
        json.as_object().expect("an object").keys().collect();
    let keys: Vec<String> = keys::KEYS.iter().map(|key| key.name.to_owned()).collect();
    assert_eq!(fields, keys.iter().collect());
}
