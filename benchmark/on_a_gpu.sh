#!/usr/bin/env bash
# What a GPU that is lent for ten minutes should tell, in order of worth.
#
#     git worktree add ../before a65aed0
#     benchmark/on_a_gpu.sh gpu ../before
#     CHECK="--device cpu --states 40 --steps 3" RATES="--warm-up-steps 8 --steps 8" \
#         FREEWAY="--total-timesteps 60 --learning-starts 40" benchmark/on_a_gpu.sh try  # a CPU
#
# Does it compute what a CPU computes, and does torch.compile help? Steps per second before and
# after; 2, 4 and 8 runs side by side; Freeway as far as the time goes, and on with it in a second
# call. Each part prints to a file of its own in the first argument, a folder.
set -u
out=${1:?a folder} root=$(cd "$(dirname "$0")/.." && pwd)
before=${2:+$(cd "$2" && pwd)}
python=$(realpath -s "$(command -v "${PYTHON:-python}")")
mkdir -p "$out" && cd "$out" || exit

part() { # name, seconds at most, and the command; it may save at the limit
  local name=$1 seconds=$2 left=$((575 - SECONDS)) begin=$SECONDS
  shift 2
  [ "$left" -gt 0 ] || return
  timeout -k 15 "$((seconds < left ? seconds : left))" "$@" > "$name.txt" 2>&1
  echo "$name: status $? after $((SECONDS - begin)) s, see $PWD/$name.txt"
}

speed=(--scripts gb_rainbow_atari --turns 1 ${RATES:---warm-up-steps 300 --steps 1000})
speed+=(--variants "bf16=true threads=1" --backups)
part check 200 "$python" "$root/tools/check_gpu.py" ${CHECK:---steps 60} --compile
for turn in 1 2; do
  for copy in $before "$root"; do
    part "speed_${turn}_$(basename "$copy")" 90 \
      "$python" "$copy/tools/speed.py" "${speed[@]}" one-step graph
  done
done
for number in 2 4 8; do
  part "parallel_$number" 60 bash -c 'for i in $(seq "$1"); do "${@:2}" & done; wait' - \
    "$number" "$python" "$root/tools/speed.py" "${speed[@]}" graph
done
run=(--env-id Freeway --bf16 --run-dir runs ${FREEWAY:-})
[ -d runs ] && run=(--resume runs/*/)
part freeway 600 "$python" "$root/gb_rainbow_atari.py" "${run[@]}"
