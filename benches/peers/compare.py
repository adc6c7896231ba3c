"""Hone beside PyTorch + transformers on the same machine, in the same minutes: a table of ratios (above 1: Hone is faster, or
takes less memory).

    pip install -r benches/peers/requirements.txt
    python benches/peers/compare.py --hone target/release/hone

Both sides run with the same threads, in turn, each measurement of the peer in a process of its own (`peer.py` says what is
measured). The peer's training step is the better of eager and `torch.compile`; where compiling fails, the reason is told.
Hone's side is `hone --json bench`. A case that Hone has no row for is printed without a ratio.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

PEER = Path(__file__).with_name("peer.py")
# Compiling can take minutes; one that takes longer than this counts as failed.
PATIENCE_S = 300

TRAIN = [("anchor", "f32"), ("anchor", "bf16"), ("small", "f32")]
DECODE = [(batch, dtype) for dtype in ("f32", "bf16") for batch in (1, 8)]


def say(text):
    print(text, file=sys.stderr, flush=True)


def peer(args, *words):
    command = [sys.executable, str(PEER), *words, "--threads", str(args.threads), "--repeats", str(args.repeats)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"took more than {PATIENCE_S} s"
    say(f"peer {' '.join(words)}: {reason}")
    return {}


def hone(args, bench):
    """The rows of one benchmark."""
    command = [args.hone, "--json", "bench", bench, "--threads", str(args.threads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def find(rows, shape, dtype, also=""):
    hits = (r for r in rows if r["shape"].startswith(f"{shape},{also}") and r["dtype"] == dtype)
    return next(hits, {})


def ratio(more, less):
    return more / less if more and less else None


def train(args, rows, shape, dtype):
    eager = peer(args, "train", shape, dtype)
    compiled = peer(args, "train", shape, dtype, "--compile") if args.compile else {}
    memory = peer(args, "train", shape, dtype, "--memory")
    if eager.get("nan"):
        say(f"{shape} {dtype}: the peer's gradients hold NaN; the times still count")
    ours = find(rows, shape, dtype)
    theirs = max((x["tokens_per_s"] for x in (eager, compiled) if x), default=None)
    yield "train step, tokens/s", f"{shape} {dtype}", ours.get("tokens_per_s"), theirs, ratio(ours.get("tokens_per_s"), theirs)
    mine, peak = (x.get("peak_bytes") for x in (ours, memory))
    yield "train step, peak bytes", f"{shape} {dtype}", mine, peak, ratio(peak, mine)


def decode(args, rows, batch, dtype):
    theirs = peer(args, "decode", "anchor", dtype, "--batch", str(batch)).get("tokens_per_s")
    ours = find(rows, "anchor", dtype, f" batch {batch},").get("tokens_per_s")
    yield "decode, tokens/s", f"anchor {dtype}, batch {batch}", ours, theirs, ratio(ours, theirs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hone", default="target/release/hone", help="the binary to measure")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both sides (default: one a core)")
    parser.add_argument("--repeats", type=int, default=5, help="of each of the peer's measurements; the least counts")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="measure the peer eager alone")
    parser.add_argument("--json", action="store_true", help="a JSON line a row instead of a table")
    args = parser.parse_args()

    def rows():
        measured = hone(args, "train-step")
        for case in TRAIN:
            yield from train(args, measured, *case)
        measured = hone(args, "decode")
        for case in DECODE:
            yield from decode(args, measured, *case)

    if not args.json:
        print(f"{'what':24}{'on':24}{'hone':>16}{'peer':>16}{'ratio':>8}")
    for what, on, ours, theirs, quotient in rows():
        if args.json:
            print(json.dumps({"what": what, "on": on, "hone": ours, "peer": theirs, "ratio": quotient}), flush=True)
        else:
            number = lambda x, digits=0: "-" if x is None else f"{x:,.{digits}f}"
            print(f"{what:24}{on:24}{number(ours):>16}{number(theirs):>16}{number(quotient, 2):>8}", flush=True)


if __name__ == "__main__":
    main()
