#!/bin/bash
# Draws docs/plots/*.svg from runs of bench/tune on the bundled model. Needs gnuplot and jq.
# Usage, in the root of the repository: bench/plots.sh [build/gcc/bench/tune]
set -euo pipefail
tune=${1:-build/gcc/bench/tune}
out=docs/plots
data=$(mktemp -d)
trap 'rm -r "$data"' EXIT
mkdir -p "$out"

# Measured: SmolLM2-135M-Instruct Q4_1 on two processor cores, by bench/tune (docs/choosing-w-n-g.md has the command).
# The other two are made up.
cpu=1:1000,2:1055,3:1128,4:1174,6:1330,8:1594,12:2155,16:2802,24:4080,32:5383,48:7968,64:10549
bent=1:1000,8:1050,16:1150,32:1500,64:2400,128:4400
flat=1:1000,32:1030,64:1080,128:1200

"$tune" --json --weights f32 --count 24 --curve $flat --limits 2,4,8,16,32,64,128 > "$data/flat.json"
"$tune" --json --weights f32 --count 24 --curve $bent > "$data/bent.json"
"$tune" --json --weights f32 --count 24 --curve $cpu > "$data/cpu.json"

# Columns: limit, tokens per step.
yield() {
  jq -r ".settings[] | select(.rows_limit and .w == $1) | [.rows_limit, .tokens_per_step] | @tsv" "$data/flat.json" \
    > "$data/yield-$1"
}
# Columns: limit, tokens by time under a curve. Limits that the curve does not reach are left out.
gain() {
  jq -r --slurpfile curve "$data/$1.json" "\$curve[0].cost as \$t | .settings[]
    | select(.rows_limit and .w == $2 and .largest_step <= (\$t | length))
    | [.rows_limit, .tokens * \$t[0] / ([.steps_by_rows, \$t[:.largest_step]] | transpose | map(.[0] * .[1]) | add)]
    | @tsv" "$data/flat.json" > "$data/gain-$1-$2"
}
# As many rows as pay: rows per step, gain.
chosen() {
  jq -r ".settings[] | select(.rows_limit == null and .w == 0 and (.published | not)) | [.rows_per_step, .gain] | @tsv" \
    "$data/$1.json" > "$data/chosen-$1"
}
for w in 0 5 7 15; do yield $w; done
for curve in cpu bent flat; do
  tr , '\n' <<< "${!curve}" | awk -F: '{print $1, $2 / 1000}' > "$data/curve-$curve"
  for w in 0 7; do gain $curve $w; done
  chosen $curve
done

gnuplot << END
set terminal svg size 640,400 font "sans-serif,13" background "white"
set grid lc rgb "#dddddd"
set logscale x 2
set key left top
set style data linespoints
set xlabel "rows of a step, at most"
set output "$out/yield.svg"
set ylabel "tokens per step"
plot [1.8:140] [0:] "$data/yield-0" t "no window" lw 2 pt 7 ps .6, "$data/yield-5" t "window (5, 3)" pt 5 ps .6, \
  "$data/yield-7" t "window (7, 4)" pt 9 ps .6, "$data/yield-15" t "window (15, 5)" pt 13 ps .6
set output "$out/cost.svg"
set xlabel "rows of a pass"
set ylabel "time, in passes of one row"
plot [1:140] [0:12] "$data/curve-cpu" t "two processor cores, measured" lw 2 pt 7 ps .6, \
  "$data/curve-bent" t "bent, made up" lw 2 pt 5 ps .6, "$data/curve-flat" t "flat, made up" lw 2 pt 9 ps .6
set output "$out/gain.svg"
set xlabel "rows of a step, at most; crosses: mean of as many rows as pay"
set ylabel "modelled gain over plain decoding"
plot [1.8:140] [0:11] "$data/gain-flat-0" t "flat" lw 2 lc 3 pt 9 ps .6, "$data/gain-flat-7" t "flat, window (7, 4)" lc 3 dt 2 pt 0, \
  "$data/gain-bent-0" t "bent" lw 2 lc 2 pt 5 ps .6, "$data/gain-bent-7" t "bent, window (7, 4)" lc 2 dt 2 pt 0, \
  "$data/gain-cpu-0" t "two cores" lw 2 lc 1 pt 7 ps .6, "$data/gain-cpu-7" t "two cores, window (7, 4)" lc 1 dt 2 pt 0, \
  "$data/chosen-flat" w points lc 3 pt 2 ps 1.5 lw 2 not, "$data/chosen-bent" w points lc 2 pt 2 ps 1.5 lw 2 not, \
  "$data/chosen-cpu" w points lc 1 pt 2 ps 1.5 lw 2 not
END

for run in flat bent cpu; do
  jq -r '"'$run':", (.settings[] | [.W, .N, .w, .published, .rows_limit // (if .published then "all" else "as they pay" end), .tokens_per_step, .rows_per_step, .largest_step,
    .gain] | @tsv), "best \(.best.W) \(.best.N) \(.best.G), texts identical: \(.identical)"' "$data/$run.json"
done
echo "limits and their modelled gains, by curve and window:"
(cd "$data" && tail -n +1 gain-*)
