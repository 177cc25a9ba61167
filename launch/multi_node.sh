#!/usr/bin/env bash
# Train on several machines over ssh: the deepspeed launcher with a hostfile that is checked first.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/multi_node.sh --hostfile FILE [--num_nodes N] [--num_gpus N] [--interface NAME] [--master_addr A]
                            [--master_port P] [--restarts N] [--doctor[=only]] [--dry-run] [--] [arguments of ds_gpt/train.py]

  --hostfile FILE   one machine a line, "name slots=GPUS"; see launch/hostfile.example
  --num_nodes N     use the first N machines of the hostfile (default: all)
  --num_gpus N      use the first N GPUs of each machine (default: all slots)
  --interface NAME  network interface that the ranks talk over, the same name on every machine: sets NCCL_SOCKET_IFNAME
                    and GLOO_SOCKET_IFNAME, and they meet at its address (default: NCCL and gloo choose)
  --master_addr A   address of the first machine (default: of --interface, else the first that `hostname -I` says there)
  --master_port P   port of the rendezvous there (default: 29500; a second job on that machine needs another)
  --restarts N      after a crash go on from the newest intact checkpoint, at most N times (default: 0), on those machines
                    that still answer; the run's folder must be named: --run-dir
  --doctor          check the machines and their network first (`ds-gpt doctor` on every rank), and train only where
                    there is no problem; --doctor=only stops there
  --dry-run         print the command, and what is passed on, and stop

These may stand anywhere before "--"; every other argument, and all after "--", goes to ds_gpt/train.py as it is.
Every machine needs passwordless ssh, this repository and the same environment at the same paths, and the folder
that this is started from. Run folders belong on a shared file system.

  launch/multi_node.sh --hostfile hostfile --doctor=only
  launch/multi_node.sh --hostfile hostfile --config ds_configs/runs/gpt2_1558m.yaml --deepspeed_config ds_configs/zero3.json

Passed on to every machine: variables of this shell that begin with NCCL_, GLOO_, TORCH_, TORCHINDUCTOR_, TRITON_,
DEEPSPEED_, DS_, HF_, OMP_, TIKTOKEN_ or UCX_, LD_LIBRARY_PATH, XDG_CACHE_HOME, CUDA_DEVICE_MAX_CONNECTIONS, and the
lines NAME=VALUE of ~/.deepspeed_env and ./.deepspeed_env, which win.

Ctrl-C (or SIGTERM): every rank finishes its step and saves, for which the launcher gives them 30 s; the status is 1.
A machine that is lost ends the run on the others: at once where it says so, else after health.hang_timeout_s. With
--restarts the run goes on without it; otherwise take it out of the hostfile and pass --resume.
TEXT
}

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
script=launch/multi_node.sh
# shellcheck source=launch/shared.sh
source "$repository/launch/shared.sh"
hostfile="" num_nodes="" num_gpus="" interface="" master_addr="" master_port=29500 restarts=0 doctor=no dry_run=false for_training=()
while (($#)); do
    case "$1" in
        --help | -h) usage && exit 0 ;;
        --dry-run) dry_run=true ;;
        --doctor) doctor=first ;;
        --doctor=only) doctor=only ;;
        --launcher | --launcher=*)
            fail "$1: only pdsh is left to choose" "the ranks of DeepSpeed's other launchers are not told who they are, and each would train alone" "leave it out; under Slurm use launch/slurm.sbatch"
            ;;
        --hostfile=* | --num_nodes=* | --num_gpus=* | --interface=* | --master_addr=* | --master_port=* | --restarts=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue
            ;;
        --hostfile | --num_nodes | --num_gpus | --interface | --master_addr | --master_port | --restarts)
            (($# > 1)) && [[ -n "$2" ]] || fail "$1 has no value" "one must follow it" "see launch/multi_node.sh --help"
            printf -v "${1#--}" '%s' "$2"
            shift
            ;;
        --) for_training+=("${@:2}") && break ;;
        *) for_training+=("$1") ;;
    esac
    shift
done
set -- "${for_training[@]}"
[[ -z "$num_nodes" ]] || require_number --num_nodes "$num_nodes" 99999
[[ -z "$num_gpus" ]] || require_number --num_gpus "$num_gpus" 1024
require_number --master_port "$master_port" 65535
[[ "$restarts" == 0 ]] || require_number --restarts "$restarts" 1000

# The hostfile, by DeepSpeed's own rules. It ignores a hostfile that does not exist and trains on this machine alone.
[[ -n "$hostfile" ]] || fail "--hostfile is missing" "it names the machines" "copy launch/hostfile.example; for this machine alone use launch/local.sh"
[[ -f "$hostfile" && -r "$hostfile" ]] ||
    fail "the hostfile '$hostfile' does not exist or cannot be read" "DeepSpeed would train on this machine alone, in silence" "check the path; launch/hostfile.example shows the format"
declare -A slots_of=()
names=() number=0 least_slots=""
while IFS= read -r line || [[ -n "$line" ]]; do
    number=$((number + 1))
    [[ "$line" =~ ^[[:space:]]*(#|$) ]] && continue
    [[ "$line" =~ ^[[:space:]]*([^[:space:]]+)[[:space:]]+slots=([1-9][0-9]*)[[:space:]]*(#.*)?$ ]] ||
        fail "$hostfile:$number: '$line' is not 'name slots=GPUS'" "the number of ranks follows from the slots" "for example: node1 slots=8"
    host="${BASH_REMATCH[1]}" slots="${BASH_REMATCH[2]}"
    [[ -z "${slots_of[$host]:-}" ]] || fail "$hostfile:$number: the machine '$host' stands there twice" "its GPUs would get two ranks each" "keep one line per machine"
    slots_of[$host]="$slots" names+=("$host")
    [[ -n "$least_slots" ]] && ((least_slots <= slots)) || least_slots="$slots"
done <"$hostfile"
hosts="${#names[@]}"
((hosts > 0)) || fail "the hostfile '$hostfile' names no machine" "there is nowhere to train" "add lines like: node1 slots=8"
[[ -z "$num_nodes" ]] || ((num_nodes <= hosts)) ||
    fail "--num_nodes $num_nodes, but '$hostfile' names $hosts machine(s)" "each node must be in the hostfile" "add machines to it, or use --num_nodes $hosts"
[[ -z "$num_gpus" ]] || ((num_gpus <= least_slots)) ||
    fail "--num_gpus $num_gpus, but a machine of '$hostfile' has $least_slots slot(s)" "two ranks would share a GPU" "use --num_gpus $least_slots or less"

names=("${names[@]:0:${num_nodes:-$hosts}}")

run_dir="" without_resume=()
read_arguments() { # arguments of training: finds those that restarts need
    local resumed=""
    while (($#)); do
        case "$1" in
            --run-dir=*) run_dir="${1#*=}" && without_resume+=("$1") ;;
            --run-dir) run_dir="${2:-}" && without_resume+=("$1") ;;
            --resume=*) resumed="${1#*=}" ;;
            --resume) [[ -z "${2:-}" || "$2" == -* ]] || { resumed="$2" && shift; } ;;
            *) without_resume+=("$1") ;;
        esac
        shift
    done
    if [[ -z "$run_dir" && -e "$resumed/run.yaml" ]]; then run_dir="$resumed" without_resume+=(--run-dir "$resumed"); fi
}
read_arguments "$@"
((restarts == 0)) || [[ -n "$run_dir" ]] || fail "--restarts without --run-dir" "restarts go on in the folder of the run" "name one that all machines share: --run-dir runs/NAME"

# pdsh joins the words into one line for the remote shell, which reads it anew: $HOME, a quote or a semicolon in an
# argument would mean something else there. DeepSpeed quotes blanks and nothing more.
for argument in "$@"; do
    [[ ! "$argument" =~ [\$\`\"\'\\\;\&\|\<\>\(\)\{\}\*\?\!\#\~] ]] ||
        fail "the argument '$argument' holds a character that the remote shells would interpret" "pdsh hands them one line of text, not a list of arguments" "write the value into a run YAML and pass that with --config"
done

# The environment of the ranks. sshd starts with an empty one, and DeepSpeed by itself passes on little of this one:
# NCCL_* from a machine with GPUs, PYTHON*, UCX*, and what is in its file of variables, at which an empty line is an error.
if [[ -n "$interface" ]]; then
    export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"
fi
passed=()
pass_on() { # NAME=VALUE, where it is from
    [[ "$1" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || fail "$2: '$1' is not NAME=VALUE" "it is to be set on every machine" "correct it"
    [[ ! "$1" =~ [\$\`\"\\]|$'\n' ]] || fail "$2: '$1' holds a character that the remote shells would interpret" "it is to be set on every machine" "set it in the shell's start-up file of each"
    passed+=("$1")
}
while IFS= read -r name; do
    [[ "$name" =~ ^(NCCL|GLOO|TORCH|TORCHINDUCTOR|TRITON|DEEPSPEED|DS|HF|OMP|TIKTOKEN|UCX)_|^(LD_LIBRARY_PATH|XDG_CACHE_HOME|CUDA_DEVICE_MAX_CONNECTIONS)$ ]] || continue
    [[ "$name" == DS_ENV_FILE || -z "${!name}" ]] || pass_on "$name=${!name}" "the environment"
done < <(compgen -e)
variables="${DS_ENV_FILE:-.deepspeed_env}" # where DeepSpeed looks for them
if [[ "$variables" == /* ]]; then files=("$variables"); else files=("$HOME/$variables" "./$variables"); fi
for file in "${files[@]}"; do
    [[ -f "$file" ]] || continue
    # shellcheck disable=SC2094  # its name is told, nothing is written
    while IFS= read -r line || [[ -n "$line" ]]; do
        [[ "$line" =~ ^[[:space:]]*(#|$) ]] || pass_on "$line" "$file"
    done <"$file"
done

# --force_multi: even a hostfile of one machine is reached over ssh, and the launcher forwards signals only there.
make_command() { # doctor or train, arguments of training
    command=(deepspeed --hostfile "$hostfile" --force_multi --launcher pdsh --num_nodes "${#names[@]}")
    [[ -z "$num_gpus" ]] || command+=(--num_gpus "$num_gpus")
    [[ -z "$master_addr" ]] || command+=(--master_addr "$master_addr")
    command+=(--master_port "$master_port")
    if [[ "$1" == doctor ]]; then command+=(--module ds_gpt "$@"); else command+=("$repository/ds_gpt/train.py" "${@:2}"); fi
}
parts=()
[[ "$doctor" == no ]] || parts+=(doctor)
[[ "$doctor" == only ]] || parts+=(train)

if $dry_run; then
    [[ -z "$interface" || -n "$master_addr" ]] || echo "they meet at the address of $interface on ${names[0]}" >&2
    ((${#passed[@]} == 0)) || printf 'passed on: %s\n' "${passed[@]}" >&2
    for part in "${parts[@]}"; do
        make_command "$part" "$@"
        printf '%q ' "${command[@]}" && echo
    done
    exit 0
fi

command -v deepspeed >/dev/null ||
    fail "the command 'deepspeed' is not on PATH" "it reaches the machines and starts the ranks" "activate the virtual environment, or pip install -e $repository"
command -v pdsh >/dev/null ||
    fail "the command 'pdsh' is not on PATH" "DeepSpeed reaches the machines with it" "install it (apt install pdsh); without it start torchrun on each machine, as the README shows"

# A password prompt would wait unseen. A machine that is gone says nothing: without keepalives ssh, and with it the
# launcher, would wait for it long after the ranks on the others have ended.
export PDSH_RCMD_TYPE=ssh
export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:+$PDSH_SSH_ARGS_APPEND }-o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=10 -o ServerAliveCountMax=3"
start_test="cd '$PWD' && test -r '$repository/ds_gpt/train.py' && test -x '$(command -v deepspeed)'"
# All of them before any rank starts: those that do would wait half an hour for one that doesn't.
said="$(pdsh -S -f 1024 -w "$(IFS=, && echo "${names[*]}")" "$start_test" 2>&1)" ||
    fail "not every machine can start the run${said:+:
$said}" "each is reached over ssh, and needs this folder, '$repository' and '$(command -v deepspeed)'" "see that ssh -o BatchMode=yes NAME works, and that these are there"

settle_address() { # of the first machine, where an interface is all that was said
    local said
    [[ -n "$interface" && -z "$master_addr_given" ]] || return 0
    said="$(pdsh -S -N -w "${names[0]}" "ip -4 -o addr show dev '$interface'" 2>&1)" || true
    [[ "$said" =~ inet\ ([0-9.]+) ]] ||
        fail "${names[0]} has no interface '$interface' with an IPv4 address${said:+: $said}" "the ranks meet at it" "see: ssh ${names[0]} ip addr; or pass --master_addr"
    master_addr="${BASH_REMATCH[1]}"
}
master_addr_given="$master_addr"
settle_address

# The variables, as a file that is gone when it has been read.
file="$(mktemp)"
((${#passed[@]} == 0)) || printf '%s\n' "${passed[@]}" >"$file"
exec 9<"$file"
rm "$file"
export DS_ENV_FILE=/proc/self/fd/9 PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"

make_command doctor "$@"
case "$doctor" in
    first) "${command[@]}" || exit ;;
    only) exec "${command[@]}" ;;
esac
make_command train "$@"
((restarts > 0)) || exec "${command[@]}" # signals go straight to the launcher, which passes them on to every machine

signals=0 launcher="" left=""
# shellcheck disable=SC2329  # called by the trap
pass_signal() { # to the launcher, which started without SIGINT, as bash's background jobs do
    signals=$((signals + 1))
    [[ -z "$launcher" ]] || kill -TERM "$launcher" 2>/dev/null || true
}
trap pass_signal INT TERM HUP
trap '[[ -z "$left" ]] || rm -f "$left"' EXIT

run_once() { # arguments of training: sets `status`
    make_command train "$@"
    "${command[@]}" </dev/null &
    launcher="$!"
    wait_through_signals "$launcher"
    launcher=""
}

drop_lost_machines() { # from `names` and the hostfile
    local name first="${names[0]}" answering=()
    for name in "${names[@]}"; do
        if pdsh -S -w "$name" "$start_test" >/dev/null 2>&1; then answering+=("$name"); else say "$name does not answer: going on without it"; fi
    done
    ((${#answering[@]} > 0)) || { say "no machine answers" && exit "$status"; }
    names=("${answering[@]}")
    [[ "${names[0]}" == "$first" || -z "$master_addr_given" ]] || { say "$first is lost, whose address was given: --master_addr" && exit "$status"; }
    [[ -n "$left" ]] || left="$(mktemp)"
    for name in "${names[@]}"; do echo "$name slots=${slots_of[$name]}"; done >"$left"
    hostfile="$left"
    settle_address
}

arguments=("$@")
for ((attempt = 0; ; attempt++)); do
    run_once "${arguments[@]}"
    # 2: bad input, or a run that a person has to see to
    ((status != 0 && status != 2 && signals == 0 && attempt < restarts)) || exit "$status"
    seconds=$((attempt < 5 ? 10 * (attempt + 1) : 60)) # a machine that starts again takes its time
    say "the run ended with status $status; restart $((attempt + 1)) of $restarts in $seconds s"
    sleep "$seconds" &
    wait "$!" || true
    ((signals == 0)) || exit "$status"
    drop_lost_machines
    [[ ! -e "$run_dir/run.yaml" ]] || arguments=("${without_resume[@]}" --resume)
done
