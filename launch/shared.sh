# What the launch scripts share; they source it. `script` is the name of the one that does, for messages.
# shellcheck shell=bash

fail() { # what, why, remedy
    printf '%s: %s\nwhy: %s\ndo:  %s\n' "$script" "$1" "$2" "$3" >&2
    exit 2
}

require_number() { # option, value, greatest
    if [[ ! "$2" =~ ^[1-9][0-9]{0,5}$ ]] || (($2 > $3)); then
        fail "$1 = '$2' is not a number from 1 to $3" "the launcher needs it to start the ranks" "correct it, or leave $1 out"
    fi
}

say() { echo "$script: $1" >&2; }

wait_through_signals() { # process: sets `status`, whatever comes until it ends; the caller's traps count that in `signals`
    local before code
    status=0
    while true; do
        before="$signals" code=0
        wait "$1" || code=$?
        ((code == 127)) || status="$code" # 127: already waited for
        [[ "$signals" != "$before" ]] || return 0 # a signal ends `wait` early
    done
}
