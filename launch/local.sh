#!/usr/bin/env bash
# Train on this machine: the deepspeed launcher with a free port, and signals that reach the ranks.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/local.sh [--num_gpus N] [--master_port P] [--dry-run] [--] [arguments of ds_gpt/train.py]

  --num_gpus N      ranks to start (default: the number of GPUs; 2 on a machine without)
  --master_port P   port of the rendezvous (default: a free one)
  --dry-run         print the command and stop

The first argument that is not one of these, and all that follow it, go to ds_gpt/train.py; so does all after "--".

  launch/local.sh
  launch/local.sh --num_gpus 8 --config ds_configs/runs/gpt_1b.yaml --deepspeed_config ds_configs/zero2.json

Ctrl-C (or SIGTERM): every rank finishes its step and saves. A second one: stop at once. A third one: kill.
Exit status: 0 trained, or interrupted and saved; 2 wrong usage; 128 + N a rank died of signal N, or the run was
stopped by it before it could save; else that of the rank that failed.
TEXT
}

fail() { # what, why, remedy
    printf 'launch/local.sh: %s\nwhy: %s\ndo:  %s\n' "$1" "$2" "$3" >&2
    exit 2
}

require_number() { # option, value, greatest
    if [[ ! "$2" =~ ^[1-9][0-9]{0,5}$ ]] || (($2 > $3)); then
        fail "$1 = '$2' is not a number from 1 to $3" "the launcher needs it to start the ranks" "correct it, or leave $1 out"
    fi
}

count_gpus() {
    if [[ "${DS_ACCELERATOR:-}" != cpu ]] && command -v nvidia-smi >/dev/null; then
        nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
num_gpus="" master_port="" dry_run=false
while (($#)); do
    case "$1" in
        --help | -h) usage && exit 0 ;;
        --dry-run) dry_run=true ;;
        --num_gpus=* | --master_port=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
        --num_gpus | --master_port)
            (($# > 1)) || fail "$1 has no value" "a number must follow it" "see launch/local.sh --help"
            if [[ "$1" == --num_gpus ]]; then num_gpus="$2" && require_number "$1" "$2" 1024; else master_port="$2" && require_number "$1" "$2" 65535; fi
            shift
            ;;
        --) shift && break ;;
        *) break ;;
    esac
    shift
done

$dry_run || command -v deepspeed >/dev/null ||
    fail "the command 'deepspeed' is not on PATH" "it starts one process per GPU" "activate the virtual environment, or pip install -e $repository"

# Which GPUs: --num_gpus, else CUDA_VISIBLE_DEVICES (the launcher reads it where --num_gpus is absent), else all.
ranks=()
if [[ -n "$num_gpus" ]]; then
    ranks=(--num_gpus "$num_gpus")
else
    gpus="$(count_gpus)"
    if ((gpus == 0)); then
        ranks=(--num_gpus 2)
    elif [[ ! "${CUDA_VISIBLE_DEVICES:-}" =~ ^[0-9]+(,[0-9]+)*$ ]]; then
        ranks=(--num_gpus "$gpus")
    fi
fi

# The launcher's fixed port 29500 would make a second job on this machine die with EADDRINUSE.
if [[ -z "$master_port" ]]; then
    master_port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')" ||
        fail "no free port was found" "python3 is needed to look for one" "pass --master_port, for example 29500"
fi

command=(deepspeed --quiet "${ranks[@]}" --master_port "$master_port" "$repository/ds_gpt/train.py" "$@")
if $dry_run; then
    printf '%q ' "${command[@]}" && echo
    exit 0
fi

# Signals. A signal to the `deepspeed` process alone leaves the ranks running without parents. A signal to its child
# launch.py makes that kill each rank after 30 s, which a large checkpoint may outlast, and send SIGTERM besides, which
# after a SIGTERM of ours would count as the second one: stop at once. So the user's signal goes to the ranks alone;
# they save and exit 0, and launch.py and `deepspeed` end behind them as after any run. What is still there at the end
# (a rank in a hung collective, after the third signal) is killed with the process group.
set -m # gives the launcher a process group of its own, whose id is the launcher's: $!

# shellcheck disable=SC2329  # these are called by the traps
members() { # processes of a group, as "pid parent" lines; from /proc, since small images have no ps
    local stat line pid parent group
    for stat in /proc/[0-9]*/stat; do
        { read -r line <"$stat"; } 2>/dev/null || continue
        pid="${line%% *}"
        read -r _ parent group _ <<<"${line##*) }" # behind the name, which may hold blanks: state, parent, group
        [[ "$group" != "$1" ]] || echo "$pid $parent"
    done
}

# shellcheck disable=SC2329
ranks_of() { # grandchildren of `deepspeed`, by way of launch.py
    members "$1" | awk -v top="$1" '{ parent[$1] = $2 } END { for (p in parent) if (parent[parent[p]] == top) print p }'
}

signals=0 stopped_by=0
# shellcheck disable=SC2329
forward() { # signal for the ranks, number of the signal that came
    local launcher="${!:-}" pids
    [[ -n "$launcher" ]] || exit $((128 + $2))
    signals=$((signals + 1))
    pids="$(ranks_of "$launcher")"
    if ((signals >= 3)); then
        echo "launch/local.sh: third signal: killing every process of the run" >&2
        stopped_by="$2"
        kill -KILL -- "-$launcher" 2>/dev/null || true
    elif [[ -n "$pids" ]]; then
        ((signals > 1)) || echo "launch/local.sh: SIG$1 to the ranks: they finish their step and save; once more to stop at once" >&2
        # shellcheck disable=SC2086  # one word per process
        kill -s "$1" -- $pids 2>/dev/null || true
    else # still starting, or over: nothing to save
        stopped_by="$2"
        kill -TERM -- "-$launcher" 2>/dev/null || true
    fi
}

# shellcheck disable=SC2329
sweep() { # no process of the run outlives this script
    local launcher="${!:-}" wait_s
    [[ -n "$launcher" ]] || return 0
    for wait_s in 0 1 1 1 1 1; do
        sleep "$wait_s"
        kill -0 -- "-$launcher" 2>/dev/null || return 0
        ((wait_s)) || kill -TERM -- "-$launcher" 2>/dev/null || return 0
    done
    kill -KILL -- "-$launcher" 2>/dev/null || true
}

trap sweep EXIT
trap 'forward INT 2' INT
trap 'forward TERM 15' TERM
trap 'forward TERM 1' HUP # the terminal closed; under nohup bash leaves HUP ignored, and the run goes on
"${command[@]}" </dev/null &

status=0
while true; do
    before="$signals"
    code=0
    wait "$!" || code=$?
    ((code == 127)) || status="$code" # 127: already waited for
    [[ "$signals" != "$before" ]] || break # a signal ends `wait` early
done
# A rank that died of signal N (9: often the kernel, out of memory) ends launch.py with -N, which arrives as 256 - N.
((status < 256 - 64)) || status=$((128 + 256 - status))
((stopped_by == 0)) || status=$((128 + stopped_by))
exit "$status"
