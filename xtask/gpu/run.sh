#!/usr/bin/env bash
# Checks kvferry on a machine with an NVIDIA GPU: without cargo, without a network, within ten minutes.
# A step that fails does not end the others. The last lines are a table: step, seconds, exit code, figures.
#
# usage: bash run.sh [--more] [--driver-for-tests] [RESULTS]
#   --more              other, longer tests: for a second run, once the first one is clean
#   --driver-for-tests  the driver for tests in place of NVIDIA's: tries the steps where no GPU is
#   RESULTS             folder for the logs of the steps (default: results, beside this script)
set -u
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=$here/kvferry
library=$here/tests/library
cluster=$here/tests/cluster
# The steps' own limits stay below this; a step that begins late gets what is left.
readonly total_s=600 kill_after_s=5

facts() {
    echo "pack: $(cat "$here/VERSION" 2>/dev/null)"
    uname -srm
    nproc
    free -g
    ulimit -l
    cat /sys/kernel/mm/transparent_hugepage/shmem_enabled
    ldconfig -p 2>/dev/null | grep libcuda
    cat /proc/driver/nvidia/gpus/*/information
    "$program" --version || return 1
    command -v nvidia-smi >/dev/null || { echo "nvidia-smi is not there" >&2; return 3; }
    nvidia-smi -L
    nvidia-smi --format=csv,noheader \
        --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,compute_mode,mig.mode.current |
        sed 's/^/gpu: /'
    nvidia-smi -q -d COMPUTE,CLOCK,PERFORMANCE
}

# The filters name tests of a test program, one after another; each must name one at least.
tests() {
    local tests=$1 filter
    shift
    for filter; do
        "$tests" --list "$filter" 2>/dev/null | grep -q ': test$' ||
            { echo "no test is named $filter in $tests" >&2; return 4; }
    done
    "$tests" --test-threads=1 --nocapture "$@"
}

# How long the steps of an engine take, alone, beside copies and beside kernels of another process.
near() {
    local seconds=4 beside until way
    python3 "$here/engine_loop.py" "$seconds" alone || return
    for way in async batch; do
        "$program" bench gpu --mib 256 --rounds 1000 --fragment-kib 2048 --ways "$way" >/dev/null 2>&1 &
        beside=$!
        python3 "$here/engine_loop.py" "$seconds" "beside copies ($way)" || return
        kill "$beside" || { echo "the copies were over before the engine's steps" >&2; return 5; }
        wait "$beside"
    done
    python3 "$here/neighbour.py" 60 >"$results/neighbour.out" &
    beside=$!
    until=$((SECONDS + 20))
    while ! grep -q ready "$results/neighbour.out"; do
        [ $SECONDS -lt $until ] || { echo "the neighbour does not start" >&2; kill "$beside"; return 6; }
        sleep 0.1
    done
    python3 "$here/engine_loop.py" "$seconds" "beside kernels" || return
    kill "$beside" && wait "$beside"
    python3 "$here/neighbour.py" "$seconds"
}

# The Python package with memory of torch: each way in which an engine may have allocated it.
rank() {
    local kind rc=0
    for kind in plain pool expandable closed; do
        PYTHONPATH=$here/python${PYTHONPATH:+:$PYTHONPATH} python3 "$here/torch_rank.py" "$kind" "$program" || rc=1
    done
    return $rc
}

# vLLM with the connector: each model in a process of its own.
vllm() {
    local model rc=0
    for model in llama gemma3; do
        PYTHONPATH=$here/python${PYTHONPATH:+:$PYTHONPATH} \
            python3 "$here/vllm_engine.py" --program "$program" check "$model" || rc=1
    done
    return $rc
}

has_vllm() {
    timeout 60 python3 -c '
import sys, msgspec, torch, zmq
from vllm.platforms import current_platform
sys.exit(not (torch.cuda.is_available() and current_platform.is_cuda()))' >/dev/null 2>&1
}

has_torch() { python3 -c "import sys, $1; sys.exit(not torch.cuda.is_available())" 2>/dev/null; }

# Figures: short lines from the log of a step.

facts_figures() { sed -n 's/^gpu: //p' "$1"; }

tests_figures() {
    sed -nE 's/^test result: .* ([0-9]+ passed; [0-9]+ failed).*/\1/p' "$1"
    sed -nE 's/^test (.*) \.\.\. FAILED$/failed: \1/p' "$1" | sort -u
}

bench_figures() {
    sed -nE 's/^(one copy each way at once: .*)/\1/p' "$1"
    sed -E 's/\([^)]*\)//g' "$1" | awk '$2 == "KiB" {
        printf "%s KiB %s: one copy %s, async %s, batch %s GB/s\n", $1, $3, $4, $5, $6 == "the" ? "none" : $6 }'
}

smoke_figures() {
    sed -nE 's/^attribute [0-9]+ \((.*)\): /\1: /p' "$1" | paste -sd ',' | grep .
    bench_figures "$1"
}

rank_figures() { grep -E '^rank ' "$1"; }

vllm_figures() { grep -E '^vllm ' "$1"; }

near_figures() { grep -E '^(step|kernels) ' "$1"; }

replay_figures() { grep -iE 'verified|mismatched|hit' "$1" | head -4; }

rows=()
failed=0

# Said at once, too: a run that is ended from outside has said what it found until then.
row() {
    rows+=("$(printf '%-10s %7s  %-4s %s' "$1" "$2" "$3" "$4")")
    echo "${rows[-1]}"
}

# step NAME LIMIT FIGURES COMMAND...
step() {
    local name=$1 limit=$2 figures=$3 log=$results/$1.log begun rc took left line first=1
    shift 3
    left=$((total_s - kill_after_s - SECONDS))
    if [ "$left" -le 0 ]; then
        skip "$name" "no time is left"
        failed=1
        return
    fi
    [ "$limit" -le "$left" ] || limit=$left
    echo "== $name: at most $limit s"
    begun=${EPOCHREALTIME/./}
    timeout -k "$kill_after_s" "$limit" "$@" >"$log" 2>&1 </dev/null
    rc=$?
    took=$(((${EPOCHREALTIME/./} - begun) / 100000))
    took=$((took / 10)).$((took % 10))
    [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ] && echo "not over after $limit s" >>"$log"
    if [ "$rc" -ne 0 ]; then
        failed=1
        tail -n 25 "$log" | cut -c 1-300
    fi
    while read -r line; do
        if [ $first -eq 1 ]; then row "$name" "$took" "$rc" "$line"; else row "" "" "" "$line"; fi
        first=0
    done < <("$figures" "$log" 2>/dev/null)
    [ $first -eq 0 ] || row "$name" "$took" "$rc" ""
}

skip() {
    echo "== $1: skipped: $2"
    row "$1" - skip "$2"
}

more=0 fake=0 results=$here/results
while [ $# -gt 0 ]; do
    case $1 in
        --more) more=1 ;;
        --driver-for-tests) fake=1 ;;
        --step)
            # A function of this script as a process of its own, which can be ended in time.
            results=$2
            shift 2
            "$@"
            exit
            ;;
        -h | --help)
            sed -n '2,8s/^# \{0,1\}//p' "$here/run.sh"
            exit 0
            ;;
        -*)
            echo "unknown option $1: see --help" >&2
            exit 2
            ;;
        *) results=$1 ;;
    esac
    shift
done
mkdir -p "$results" || exit 2
results=$(cd "$results" && pwd)
self=(bash "$here/run.sh" --step "$results")
run_tests=("${self[@]}" tests)
bench=("$program" bench gpu)

export RUST_BACKTRACE=1 PROGRAM_UNDER_TEST=$program
if [ $fake -eq 1 ]; then
    # Under the names by which a driver is looked for.
    mkdir -p "$results/driver"
    for name in libcuda.so libcuda.so.1; do
        ln -sf "$here/tests/libkvferry_fake_cuda.so" "$results/driver/$name"
    done
    export LD_LIBRARY_PATH=$results/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
    export CUDA_TESTS=gpu
fi

first_run() {
    step facts 15 facts_figures "${self[@]}" facts
    # Driver, context, pinned host memory, both directions, bytes, and one small batch.
    step smoke 40 smoke_figures "${bench[@]}" --mib 8 --rounds 2 --fragment-kib 2048
    step ipc 45 tests_figures "${run_tests[@]}" "$library" tests::neighbour
    step engine 50 tests_figures "${run_tests[@]}" "$cluster" on_gpus::pages_of_separate_layers_bring_every_byte_back
    step chunks 50 tests_figures "${run_tests[@]}" "$cluster" on_gpus::memory_in_chunks_by_descriptors_brings_every_byte_back
    # Batches of thousands of copies from here on.
    step copies 90 tests_figures "${run_tests[@]}" "$library" tests::copies::a_cancelled \
        tests::copies::the_end tests::copies::late_streams_first
    step death 50 tests_figures "${run_tests[@]}" "$cluster" on_gpus::a_worker_that_is_killed
    step link 50 bench_figures "${bench[@]}" --mib 256 --rounds 11 --fragment-kib 2048,512,128,64
    if has_torch torch,msgspec,zmq; then
        step rank 65 rank_figures "${self[@]}" rank
    else
        skip rank "no python3 with torch that finds a GPU, msgspec and pyzmq"
    fi
    if has_torch torch; then
        step near 75 near_figures "${self[@]}" near
    else
        skip near "no python3 with torch that finds a GPU"
    fi
    # Last: some drivers hang by many batches of small copies. The ways apart, so that one is seen without the other.
    step small 30 bench_figures "${bench[@]}" --mib 64 --rounds 11 --fragment-kib 32,18,8,4 --ways async
    step batches 30 bench_figures "${bench[@]}" --mib 64 --rounds 11 --fragment-kib 32,18,8,4 --ways batch
}

second_run() {
    local replay=("$program" replay --device cuda --requests 60 --g1-pages 64 --sequential)
    step facts 15 facts_figures "${self[@]}" facts
    step replay 30 replay_figures "${replay[@]}"
    step together 30 replay_figures env KVFERRY_GPU_COPY=batch "${replay[@]}"
    if has_vllm; then
        step vllm 150 vllm_figures "${self[@]}" vllm
    else
        skip vllm "no python3 with vllm that finds a GPU, msgspec and pyzmq"
    fi
    step processes 170 tests_figures "${run_tests[@]}" "$cluster" on_gpus
    step seeds 200 tests_figures "${run_tests[@]}" "$library" tests::copies
}

if [ $more -eq 1 ]; then second_run; else first_run; fi

{
    echo
    printf '%-10s %7s  %-4s %s\n' step seconds rc figures
    printf '%s\n' "${rows[@]}"
    echo "$SECONDS s in all; logs of the steps: $results"
} | tee "$results/table.txt"
exit $failed
