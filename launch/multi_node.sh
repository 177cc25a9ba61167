#!/usr/bin/env bash
# Train on several machines over ssh: the deepspeed launcher with a hostfile that is checked first.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/multi_node.sh --hostfile FILE [--num_nodes N] [--num_gpus N] [--master_addr A] [--master_port P]
                            [--launcher pdsh|openmpi|mpich|impi|mvapich|slurm] [--dry-run] [--] [arguments of ds_gpt/train.py]

  --hostfile FILE   one machine a line, "name slots=GPUS"; see launch/hostfile.example
  --num_nodes N     use the first N machines of the hostfile (default: all)
  --num_gpus N      use the first N GPUs of each machine (default: all slots)
  --master_addr A   address of the first machine (default: asked from it over ssh)
  --master_port P   port of the rendezvous there (default: 29500; a second job on that machine needs another)
  --launcher L      how to reach the machines (default: pdsh, which runs over ssh)
  --dry-run         print the command and stop

The first argument that is not one of these, and all that follow it, go to ds_gpt/train.py; so does all after "--".
Every machine needs passwordless ssh, this repository and the same environment at the same paths, and the folder
that this is started from. Run folders belong on a shared file system.

  launch/multi_node.sh --hostfile hostfile --config ds_configs/runs/gpt2_1558m.yaml --deepspeed_config ds_configs/zero3.json
TEXT
}

fail() { # what, why, remedy
    printf 'launch/multi_node.sh: %s\nwhy: %s\ndo:  %s\n' "$1" "$2" "$3" >&2
    exit 2
}

require_number() { # option, value, greatest
    if [[ ! "$2" =~ ^[1-9][0-9]{0,5}$ ]] || (($2 > $3)); then
        fail "$1 = '$2' is not a number from 1 to $3" "the launcher needs it to start the ranks" "correct it, or leave $1 out"
    fi
}

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
hostfile="" num_nodes="" num_gpus="" master_addr="" master_port=29500 launcher=pdsh dry_run=false
while (($#)); do
    case "$1" in
        --help | -h) usage && exit 0 ;;
        --dry-run) dry_run=true ;;
        --hostfile=* | --num_nodes=* | --num_gpus=* | --master_addr=* | --master_port=* | --launcher=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue
            ;;
        --hostfile | --num_nodes | --num_gpus | --master_addr | --master_port | --launcher)
            (($# > 1)) && [[ -n "$2" ]] || fail "$1 has no value" "one must follow it" "see launch/multi_node.sh --help"
            printf -v "${1#--}" '%s' "$2"
            shift
            ;;
        --) shift && break ;;
        *) break ;;
    esac
    shift
done
[[ -z "$num_nodes" ]] || require_number --num_nodes "$num_nodes" 99999
[[ -z "$num_gpus" ]] || require_number --num_gpus "$num_gpus" 1024
require_number --master_port "$master_port" 65535

# The hostfile, by DeepSpeed's own rules. It ignores a hostfile that does not exist and trains on this machine alone.
[[ -n "$hostfile" ]] || fail "--hostfile is missing" "it names the machines" "copy launch/hostfile.example; for this machine alone use launch/local.sh"
[[ -f "$hostfile" && -r "$hostfile" ]] ||
    fail "the hostfile '$hostfile' does not exist or cannot be read" "DeepSpeed would train on this machine alone, in silence" "check the path; launch/hostfile.example shows the format"
declare -A slots_of=()
number=0 least_slots=""
while IFS= read -r line || [[ -n "$line" ]]; do
    number=$((number + 1))
    [[ "$line" =~ ^[[:space:]]*(#|$) ]] && continue
    [[ "$line" =~ ^[[:space:]]*([^[:space:]]+)[[:space:]]+slots=([1-9][0-9]*)[[:space:]]*(#.*)?$ ]] ||
        fail "$hostfile:$number: '$line' is not 'name slots=GPUS'" "the number of ranks follows from the slots" "for example: node1 slots=8"
    host="${BASH_REMATCH[1]}" slots="${BASH_REMATCH[2]}"
    [[ -z "${slots_of[$host]:-}" ]] || fail "$hostfile:$number: the machine '$host' stands there twice" "its GPUs would get two ranks each" "keep one line per machine"
    slots_of[$host]="$slots"
    [[ -n "$least_slots" ]] && ((least_slots <= slots)) || least_slots="$slots"
done <"$hostfile"
hosts="${#slots_of[@]}"
((hosts > 0)) || fail "the hostfile '$hostfile' names no machine" "there is nowhere to train" "add lines like: node1 slots=8"
[[ -z "$num_nodes" ]] || ((num_nodes <= hosts)) ||
    fail "--num_nodes $num_nodes, but '$hostfile' names $hosts machine(s)" "each node must be in the hostfile" "add machines to it, or use --num_nodes $hosts"
[[ -z "$num_gpus" ]] || ((num_gpus <= least_slots)) ||
    fail "--num_gpus $num_gpus, but a machine of '$hostfile' has $least_slots slot(s)" "two ranks would share a GPU" "use --num_gpus $least_slots or less"

# pdsh joins the words into one line for the remote shell, which reads it anew: $HOME, a quote or a semicolon in an
# argument would mean something else there. DeepSpeed quotes blanks and nothing more.
for argument in "$@"; do
    [[ "$launcher" != pdsh || ! "$argument" =~ [\$\`\"\'\\\;\&\|\<\>\(\)\{\}\*\?\!\#\~] ]] ||
        fail "the argument '$argument' holds a character that the remote shells would interpret" "pdsh hands them one line of text, not a list of arguments" "write the value into a run YAML and pass that with --config"
done

# --force_multi: even a hostfile of one machine is reached over ssh, and the launcher forwards signals only there.
command=(deepspeed --hostfile "$hostfile" --force_multi --launcher "$launcher" --num_nodes "${num_nodes:-$hosts}")
[[ -z "$num_gpus" ]] || command+=(--num_gpus "$num_gpus")
[[ -z "$master_addr" ]] || command+=(--master_addr "$master_addr")
command+=(--master_port "$master_port" "$repository/ds_gpt/train.py" "$@")
if $dry_run; then
    printf '%q ' "${command[@]}" && echo
    exit 0
fi

command -v deepspeed >/dev/null ||
    fail "the command 'deepspeed' is not on PATH" "it reaches the machines and starts the ranks" "activate the virtual environment, or pip install -e $repository"
[[ "$launcher" != pdsh ]] || command -v pdsh >/dev/null ||
    fail "the command 'pdsh' is not on PATH" "DeepSpeed reaches the machines with it" "install it (apt install pdsh), or use --launcher openmpi"
exec "${command[@]}" # signals go straight to the launcher, which passes them on to every machine
