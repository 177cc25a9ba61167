#!/usr/bin/env bash
# Train on this machine: the deepspeed launcher with a free port, and signals that reach the ranks.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/local.sh [--num_gpus N] [--restarts N] [--master_port P] [--dry-run] [--] [arguments of ds_gpt/train.py]

  --num_gpus N      ranks to start (default: the number of GPUs; 2 on a machine without)
  --restarts N      after a crash go on from the newest intact checkpoint, at most N times (default: 0)
  --master_port P   port of the rendezvous (default: a free one)
  --dry-run         print the command and stop

These may stand anywhere before "--"; every other argument, and all after "--", goes to ds_gpt/train.py as it is.

  launch/local.sh
  launch/local.sh --num_gpus 8 --config ds_configs/runs/gpt_1b.yaml --deepspeed_config ds_configs/zero2.json

Ctrl-C (or SIGTERM): every rank finishes its step and saves. A second one: stop at once. A third one: kill.
Restarts: a crash is a rank that died of a signal or of an error (status 1: also out of memory, a hang that the
watchdog ended, a GPU that was lost), but not bad input or a sick run (2), nor a run that a signal stopped. The run goes
on in its folder, with fewer ranks where GPUs are gone: the most that the global batch divides by. It is given up when
two restarts in a row got to no new checkpoint (so set checkpoints.every).

Exit status, of the last attempt: 0 trained, or interrupted and saved; 2 bad input, or the run asked for a person;
128 + N a rank (or its launcher) died of signal N, or the run was stopped by it before it could save; else that of the rank that failed,
1 for any error.
TEXT
}

count_gpus() {
    if [[ "${DS_ACCELERATOR:-}" != cpu ]] && command -v nvidia-smi >/dev/null; then
        nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
script=launch/local.sh
# shellcheck source=launch/shared.sh
source "$repository/launch/shared.sh"
num_gpus="" master_port="" restarts=0 dry_run=false for_training=()
while (($#)); do
    case "$1" in
        --help | -h) usage && exit 0 ;;
        --dry-run) dry_run=true ;;
        --num_gpus=* | --restarts=* | --master_port=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
        --num_gpus | --restarts | --master_port)
            (($# > 1)) || fail "$1 has no value" "a number must follow it" "see launch/local.sh --help"
            case "$1" in
                --num_gpus) num_gpus="$2" && require_number "$1" "$2" 1024 ;;
                --restarts) restarts="$2" && { [[ "$2" == 0 ]] || require_number "$1" "$2" 1000; } ;;
                --master_port) master_port="$2" && require_number "$1" "$2" 65535 ;;
            esac
            shift
            ;;
        --) for_training+=("${@:2}") && break ;;
        *) for_training+=("$1") ;;
    esac
    shift
done
set -- "${for_training[@]}"

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

make_command() { # arguments of training
    # The launcher's fixed port 29500 would make a second job on this machine die with EADDRINUSE.
    local port="$master_port"
    if [[ -z "$port" ]]; then
        port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')" ||
            fail "no free port was found" "python3 is needed to look for one" "pass --master_port, for example 29500"
    fi
    command=(deepspeed --quiet "${ranks[@]}" --master_port "$port" "$repository/ds_gpt/train.py" "$@")
}

make_command "$@"
if $dry_run; then
    printf '%q ' "${command[@]}" && echo
    exit 0
fi

# Restarts go on in the folder of the run, so it is settled here: another job of the same name may make the next one.
folder="" branch="" config=() without_resume=()

read_arguments() { # arguments of training: finds those that restarts need
    local option value takes_value resume=none
    while (($#)); do
        option="${1%%=*}" value="" takes_value=false
        case "$option" in
            --config | --deepspeed_config | --set | --run-dir | --resume)
                if [[ "$1" == *=* ]]; then
                    value="${1#*=}"
                elif (($# > 1)) && [[ "$option" != --resume || "$2" != -* ]]; then
                    value="$2" takes_value=true
                fi
                ;;
        esac
        case "$option" in
            --config | --deepspeed_config | --set) config+=("$option=$value") && without_resume+=("$option=$value") ;;
            --run-dir) folder="$value" ;;
            --resume) resume="$value" ;;
            *) without_resume+=("$1") ;;
        esac
        shift
        ! $takes_value || shift
    done
    if [[ "$resume" != none && -n "$resume" ]]; then
        if [[ -e "$resume/run.yaml" ]]; then folder="$resume"; else branch="$resume"; fi
    fi
    [[ -z "$folder" ]] || return 0
    local name number=1 path devices
    IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-0}"
    name="$(show_config "${ranks[1]:-${#devices[@]}}" 2>/dev/null | sed -n 's/^name  *"\([^"]*\)".*/\1/p')" || true
    [[ -n "$name" ]] || return 0 # bad input: training says what is wrong
    path="runs/$name"
    if [[ -z "$resume" && -e "$path" ]]; then # --resume alone: the newest run of this name
        while [[ -e "runs/$name-$((number + 1))" ]]; do number=$((number + 1)); done
        ((number == 1)) || path="runs/$name-$number"
    else
        mkdir -p runs
        until mkdir "$path" 2>/dev/null || [[ ! -e "$path" ]]; do number=$((number + 1)) && path="runs/$name-$number"; done
    fi
    folder="$path"
}

show_config() { # number of ranks
    local device=cpu
    ((${gpus:-0} == 0)) || device=cuda
    PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" python3 -m ds_gpt show-config --device "$device" --devices "$1" "${config[@]}"
}

newest_step() { # of the complete checkpoints in the folder; 0 where there is none
    local newest
    newest="$(find "$folder/checkpoints" -maxdepth 1 -name 'step_*' 2>/dev/null | sed 's/.*step_0*//' | sort -n | tail -n 1)"
    echo "${newest:-0}"
}

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

signals=0 stopped_by=0 launcher="" pause=""
# shellcheck disable=SC2329
forward() { # signal for the ranks, number of the signal that came
    local pids
    if [[ -z "$launcher" ]]; then # before the first start, or between two
        [[ -z "$pause" ]] || kill "$pause" 2>/dev/null || true
        exit $((128 + $2))
    fi
    signals=$((signals + 1))
    pids="$(ranks_of "$launcher")"
    if ((signals >= 3)); then
        say "third signal: killing every process of the run"
        stopped_by="$2"
        kill -KILL -- "-$launcher" 2>/dev/null || true
    elif [[ -n "$pids" ]]; then
        ((signals > 1)) || say "SIG$1 to the ranks: they finish their step and save; once more to stop at once"
        # shellcheck disable=SC2086  # one word per process
        kill -s "$1" -- $pids 2>/dev/null || true
    else # still starting, or over: nothing to save
        stopped_by="$2"
        kill -TERM -- "-$launcher" 2>/dev/null || true
    fi
}

# shellcheck disable=SC2329
sweep() { # no process of the run outlives this script
    local wait_s
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

left_ranks() { # whether ranks of a group are still there
    local pid
    for pid in $(members "$1" | cut -d ' ' -f 1); do
        ! grep -qaF "$repository/ds_gpt/train.py" "/proc/$pid/cmdline" 2>/dev/null || return 0
    done
    return 1
}

run_once() { # arguments of training: runs it to its end, leaves no process of it, and sets `status`
    make_command "$@"
    "${command[@]}" </dev/null &
    launcher="$!"
    wait_through_signals "$launcher"
    # A rank that died of signal N (9: often the kernel, out of memory) ends launch.py with -N, which arrives as 256 - N.
    ((status < 256 - 64)) || status=$((128 + 256 - status))
    # launch.py waits for its ranks. Where it is itself killed, `deepspeed` ends with 0 while they go on.
    if ((status == 0)) && left_ranks "$launcher"; then
        say "deepspeed's launch.py was killed; its ranks are asked to save and end"
        status=137
    fi
    ((stopped_by == 0)) || status=$((128 + stopped_by))
}

fewer_ranks() { # after GPUs were lost: sets `ranks` to as many as there are, or fewer, that the global batch divides by
    local asked="${ranks[1]:-}" left count
    left="$(count_gpus)"
    ((${gpus:-0} > 0)) && [[ -n "$asked" && "$left" -lt "$asked" ]] || return 0
    for ((count = left; count > 0; count--)); do
        if show_config "$count" >/dev/null 2>&1; then
            ranks=(--num_gpus "$count") && say "$left of $asked GPUs are left: going on with $count ranks"
            return 0
        fi
    done
    say "$left of $asked GPUs are left, and no number of ranks suits the configuration" && return 1
}

if ((restarts == 0)); then
    run_once "$@"
    exit "$status"
fi

gpus="$(count_gpus)"
read_arguments "$@"
arguments=("${without_resume[@]}" ${folder:+--run-dir "$folder"})
if [[ -n "$branch" ]]; then arguments+=("--resume=$branch"); elif [[ -e "$folder/run.yaml" ]]; then arguments+=(--resume); fi
[[ -n "$folder" ]] || arguments=("$@")
reached="$([[ -n "$folder" ]] && newest_step || echo 0)" stuck=0
for ((attempt = 0; ; attempt++)); do
    run_once "${arguments[@]}"
    sweep
    launcher=""
    [[ -z "$folder" ]] || rmdir "$folder" 2>/dev/null || true # claimed, and not used
    # 130, 143: a rank that was asked to end before it could save
    ((status != 0 && status != 2 && status != 130 && status != 143 && signals == 0)) || exit "$status"
    [[ -n "$folder" ]] || { say "no restart: the folder of the run is not known" && exit "$status"; }
    why="the run ended with status $status"
    ((status <= 128)) || why="a rank died of signal $((status - 128))"
    before="$reached" reached="$(newest_step)"
    why="$why; its newest checkpoint is of step $reached"
    if ((attempt > 0 && reached <= before)); then stuck=$((stuck + 1)); else stuck=0; fi
    ((attempt < restarts)) || { say "$why; no restart is left of $restarts" && exit "$status"; }
    ((stuck < 2)) || { say "$why, as before the last two restarts: giving up" && exit "$status"; }
    [[ -z "$branch" || "$reached" != 0 ]] || { say "$why, so there is nothing to go on from but '$branch'" && exit "$status"; }
    fewer_ranks || exit "$status"
    seconds=$((attempt < 5 ? 2 * (attempt + 1) : 10))
    say "$why; restart $((attempt + 1)) of $restarts in $seconds s"
    sleep "$seconds" &
    pause="$!"
    wait "$pause" || true
    pause=""
    [[ ! -e "$folder/run.yaml" ]] || arguments=("${without_resume[@]}" --run-dir "$folder" --resume)
done
