"""One measurement of the peer: PyTorch with transformers' MiniMaxForCausalLM, in a process of its own.

Prints a JSON object. Weights are random from the config; denormals are flushed to zero, as Hone's threads do.

A training step is forward, loss, backward, fused AdamW and zero_grad. Every repeat starts from the same weights (put back
outside the clock), so that a NaN gradient, which this model gives on some machines, changes no later repeat's routes; it is
told in `nan`.

`peak_bytes` is the most resident memory of two steps above what is resident when weights, gradients and AdamW's moments exist:
a step of 8 tokens makes those and loads what loads late, the allocator gives freed pages back, the system's high mark is
reset, and two whole steps run with the gradients kept and set to zero.
"""

import argparse
import ctypes
import json
import time

import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

SHAPES = {
    # hidden, heads, kv_heads, head_dim, intermediate, vocabulary, sequences, length
    "anchor": (256, 4, 2, 64, 512, 4096, 4, 512),
    "small": (64, 2, 1, 32, 128, 259, 8, 64),
}
LAYERS = 8
PROMPT, NEW = 64, 32


def build(shape, dtype):
    hidden, heads, kv_heads, head_dim, intermediate, vocabulary, sequences, length = SHAPES[shape]
    config = MiniMaxConfig(
        hidden_size=hidden,
        num_hidden_layers=LAYERS,
        layer_types=["linear_attention"] * (LAYERS - 1) + ["full_attention"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    model = MiniMaxForCausalLM(config).to(dtype)
    return model, vocabulary, sequences, length


def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def least(repeats, step, before=lambda: None):
    """The least seconds of `repeats`, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        before()
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def train(args, dtype):
    model, vocabulary, sequences, length = build(args.shape, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if args.compile else model

    def step(tokens, keep=False):
        forward(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)

    tokens = torch.randint(vocabulary, (sequences, length))
    peak = None
    if args.memory:
        step(tokens[:1, :8], keep=True)
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
        before = resident("VmRSS")
        for _ in range(2):
            step(tokens, keep=True)
        return {"peak_bytes": resident("VmHWM") - before}
    weights = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def restore():
        for p, w in zip(model.parameters(), weights):
            p.copy_(w)

    model(input_ids=tokens, labels=tokens).loss.backward()
    nan = any(p.grad is not None and not p.grad.isfinite().all() for p in model.parameters())
    optimizer.zero_grad()
    seconds = least(args.repeats, lambda: step(tokens), restore)
    return {"tokens_per_s": sequences * length / seconds, "nan": nan}


def decode(args, dtype):
    model, vocabulary, _, _ = build(args.shape, dtype)
    model.eval()
    prompt = torch.randint(vocabulary, (args.batch, PROMPT))
    settings = dict(do_sample=False, use_cache=True, min_new_tokens=NEW, max_new_tokens=NEW)

    def step():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert out.shape == (args.batch, PROMPT + NEW), out.shape

    with torch.inference_mode():
        return {"tokens_per_s": args.batch * NEW / least(args.repeats, step)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["train", "decode"])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("dtype", choices=["f32", "bf16"])
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded at once")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step's model")
    parser.add_argument("--memory", action="store_true", help="measure a training step's memory, not its time")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    print(json.dumps({"train": train, "decode": decode}[args.what](args, dtype)))


if __name__ == "__main__":
    main()
