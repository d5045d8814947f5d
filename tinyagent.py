"""TinyAgent: a transformer of some 120 thousand parameters that reads and writes the text of a
tool-using episode.

Trains it from nothing to imitate a scripted explorer, which knows the tools but no answer, prints
an episode sampled from it and saves a checkpoint: the starting policy of the reinforcement learning
scripts, for their --init-from.

    python tinyagent.py                                        # half a minute on two CPU cores
    python grpo.py --init-from runs/tinyagent__bugfix__1.pt

Shapes: B episodes, T tokens, V vocabulary, D width, L blocks, H heads, S cache slots.
"""

import itertools
import math
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro

from bugfix_env import ENVS, PIECES, longest_episode

# ---- 3. Model ------------------------------------------------------------------------------------


class Tokenizer:
    """Closed vocabulary of words with the space before them: decode(encode(text)) == text. Ids are
    only ever appended to an episode: what the model wrote is never encoded again."""

    def __init__(self, vocabulary):
        self.words = ["<pad>", *vocabulary]
        self.ids = {word: i for i, word in enumerate(self.words)}

    @lru_cache(maxsize=1 << 13)  # noqa: B019
    def encode(self, text):
        """Text to a tuple of ids. Raises ValueError naming a word outside the vocabulary."""
        words = PIECES.findall(text)
        unknown = [word for word in words if word not in self.ids]
        if unknown or "".join(words) != text:
            raise ValueError(f"not in the vocabulary: {(unknown or [text])[0]!r} in {text!r}")
        return tuple(self.ids[word] for word in words)

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)


def rotate(x, rotation):
    """Rotary position embedding (2104.09864): turns each pair of neighbouring features of x
    (B, T, ..., D/H) by its position's angle, a product with rotation (B or 1, T, ..., D/H/2)."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation).flatten(
        -2
    )


class Block(nn.Module):
    """Pre-norm transformer block, at first nearly the identity: its projections start at zero."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        for layer in (self.proj, self.down):
            nn.init.zeros_(layer.weight)

    def forward(self, x, slots, rotation, cache=None, at=None):
        """x (B, T, D) -> (B, T, D), or (B, Q, D) at the positions at (B, Q). See TinyAgent."""
        B, T, _ = x.shape
        rows = torch.arange(B, device=x.device)[:, None]
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.n_heads, -1)
        (q, k), v, query_slots = rotate(qkv[:, :, :2], rotation).unbind(2), qkv[:, :, 2], slots
        if at is not None:  # keys and values of all positions, queries of these
            x, q, query_slots = x[rows, at], q[rows, at], slots[rows, at]
        if cache is not None:
            cache[0][rows, :, slots], cache[1][rows, :, slots] = k, v
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if cache is None else cache
        mask = None  # causal; k and v are (B, H, T or S, D/H)
        if cache is not None or at is not None:
            seen = torch.arange(k.shape[2], device=x.device) <= query_slots[..., None]
            mask = torch.where(seen, 0.0, -torch.inf)[:, None]  # (B, 1, T or Q, T or S)
        q = q.transpose(1, 2)  # (B, H, T or Q, D/H)
        if cache is not None and q.shape[2] == 1:  # decoding: the fused kernel takes twice as long
            y = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyAgent(nn.Module):
    """Decoder-only transformer with rotary positions, no dropout, fp32."""

    def __init__(self, vocab_size, *, d_model=64, n_layers=2, n_heads=2):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList([Block(d_model, n_heads) for _ in range(n_layers)])
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size, bias=False)
        for table in (self.embed, self.head):
            nn.init.normal_(table.weight, std=0.1)
        size = d_model // n_heads
        frequencies = 1000.0 ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("frequencies", frequencies)  # (D/H/2,)

    def forward(self, tokens, cache=None, slots=None, *, at=None, return_hidden=False):
        """tokens (B, T) -> logits (B, T, V), row t predicting token t + 1, or hidden states
        (B, T, D) before the head. With at (B, Q), at these positions only: nobody reads what would
        follow a token of the tools, so the last block takes its key and value and spares the rest.

        With a cache (L, 2, B, H, S, D/H), token t of row b stands at position slots[b, t] (B, T):
        its key and value are written there and it attends to slots up to its own, in prefill as in
        decoding. Padding goes to the last slot, S - 1, which no real token may use.
        """
        B, T = tokens.shape
        if slots is None:
            slots = torch.arange(T, device=tokens.device)[None]  # (1, T)
        angles = (slots[..., None] * self.frequencies)[:, :, None, None]  # (1 or B, T, 1, 1, D/H/2)
        rotation, slots = torch.polar(torch.ones_like(angles), angles), slots.expand(B, T)
        x = self.embed(tokens)  # (B, T, D)
        for i, block in enumerate(self.blocks):
            is_last = i == len(self.blocks) - 1
            x = block(
                x, slots, rotation, None if cache is None else cache[i], at if is_last else None
            )
        hidden = self.norm(x)
        return hidden if return_hidden else self.head(hidden)

    def make_cache(self, batch_size, num_slots):
        heads, size = self.blocks[0].n_heads, self.embed.weight.shape[1]
        shape = (len(self.blocks), 2, batch_size, heads, num_slots, size // heads)
        return self.embed.weight.new_zeros(shape)


def sample_tokens(logits, uniforms, temperature):
    """Inverse-CDF sampling: logits (N, V), CPU uniforms (N,) in [0, 1) -> ids (N,) and their
    log-probabilities (N,). Draws the first token whose cumulative probability exceeds uniform *
    total, hence never one of probability zero. Temperature 0 is greedy."""
    logprobs = F.log_softmax(logits / (temperature or 1.0), dim=-1)
    ids = logits.argmax(-1)
    if temperature:
        cdf = logprobs.double().exp().cpu().cumsum(-1)  # CUDA has no deterministic cumsum
        ids = (cdf <= uniforms.double()[:, None] * cdf[:, -1:]).sum(-1).to(logits.device)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def sample_turn(model, cache, starts, pending, uniforms, *, budgets, stop_id, temperature):
    """Absorbs each row's pending ids in one pass, then samples its message until it closes (with
    stop_id, if any) or its budget is spent. Returns N lists of ids and their log-probabilities.

    starts (N,): cached tokens; pending: N lists of ids not yet in the cache, best sorted by length,
    since 64 rows at a time are padded; uniforms (N, longest budget); budgets (N,) in tokens. The
    last sampled id is not in the cache: it has to be the first of the next pending ids.
    """
    device, N = starts.device, len(pending)
    lengths = torch.tensor([len(ids) for ids in pending], device=device)
    trash = cache.shape[-2] - 1  # padding and closed rows write to a slot that is never read
    last_logits = []
    for part in (slice(n, n + 64) for n in range(0, N, 64)):
        chunk = np.array(list(itertools.zip_longest(*pending[part], fillvalue=0)), np.int64).T
        chunk = torch.from_numpy(chunk).to(device)  # (n, C)
        columns = torch.arange(chunk.shape[1], device=device)
        slots = torch.where(columns < lengths[part, None], starts[part, None] + columns, trash)
        logits = model(chunk, cache[:, :, part], slots, at=lengths[part, None] - 1)
        last_logits.append(logits[:, 0])
    logits, ids, logprobs, is_open = torch.cat(last_logits), [], [], []  # logits (N, V)
    open_rows = budgets > 0
    for step in range(uniforms.shape[1]):
        token, logprob = sample_tokens(logits, uniforms[:, step], temperature)
        ids.append(token), logprobs.append(logprob), is_open.append(open_rows)
        open_rows = open_rows & (budgets > step + 1)
        if stop_id is not None:
            open_rows = open_rows & (token != stop_id)
        if not open_rows.any():
            break
        slots = torch.where(open_rows, starts + lengths + step, trash)[:, None]
        logits = model(token[:, None], cache, slots)[:, 0]
    counts = torch.stack(is_open, 1).sum(1).tolist()
    ids, logprobs = torch.stack(ids, 1).tolist(), torch.stack(logprobs, 1).tolist()
    return [x[:n] for x, n in zip(ids, counts)], [x[:n] for x, n in zip(logprobs, counts)]


# ---- 5. Warm start -------------------------------------------------------------------------------


def explorer_episodes(tokenizer, make_env, *, seed, step, num_episodes):
    """Episodes of the scripted explorer on 1,024 training tasks. Returns tokens (B, T) and kinds
    (B, T): 0 prompt and padding, 1 the explorer's own, 2 + i the answer of env.tools[i]."""
    rng = np.random.default_rng([seed, step, 1])
    rows, row_kinds = [], []
    for _ in range(num_episodes):
        env, done = make_env(), False
        ids = list(tokenizer.encode(env.reset(env.task("train", int(rng.integers(1024))))[0]))
        kinds = [0] * len(ids)
        while not done:
            action = env.explore(rng)
            observation, _, done, _, info = env.step(action)
            for text, kind in ((action, 1), (observation, 2 + env.tools.index(info["tool"]))):
                ids += tokenizer.encode(text)
                kinds += [kind] * (len(ids) - len(kinds))
        rows.append(torch.from_numpy(np.array(ids)))
        row_kinds.append(torch.from_numpy(np.array(kinds)))
    return [nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (rows, row_kinds)]


def warm_start(model, tokenizer, make_env, args):
    """Imitates the explorer: language modelling of its whole episodes, tool output included (or of
    its own tokens only). It knows no answer: this teaches the format, the tools, and what `read`
    and `test` will say after an edit. Returns metrics, the losses those of the last tenth."""
    start, num_tokens, losses, env = time.time(), 0, {}, make_env()
    device, steps = next(model.parameters()).device, args.warm_start_steps
    batch_size = args.warm_start_batch_size or env.warm_start_batch_size
    peak = args.warm_start_learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.0, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        episodes = explorer_episodes(
            tokenizer, make_env, seed=args.seed, step=step, num_episodes=batch_size
        )
        tokens, kinds = (x.to(device) for x in episodes)
        is_target = (kinds > 0) if args.warm_start_observations else (kinds == 1)
        b, t = (kinds > 0).nonzero(as_tuple=True)
        hidden = model(tokens[:, :-1], return_hidden=True)  # (B, T - 1, D)
        nll = F.cross_entropy(model.head(hidden[b, t - 1]), tokens[b, t], reduction="none")
        if step >= int(0.9 * steps):
            for kind, name in enumerate(("policy", *env.tools), 1):
                losses.setdefault(name, []).append(nll[kinds[b, t] == kind].detach())
        optimizer.zero_grad()
        (nll * is_target[b, t]).sum().div(is_target.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_tokens += len(b)
    metrics = {"episodes": steps * batch_size, "tokens": num_tokens, "seconds": time.time() - start}
    losses = {name: torch.cat(values) for name, values in losses.items()}
    metrics |= {f"loss_{name}": x.mean().item() for name, x in losses.items() if len(x)}
    return {f"warm_start/{key}": value for key, value in metrics.items()}


# ---- Imitation and a sampled episode -------------------------------------------------------------


@dataclass
class Args:
    seed: int = 1  # seed of the weights and of the explorer
    cuda: bool = False  # run on the GPU; without one the script stops
    env_id: Literal["bugfix", "number"] = "bugfix"  # BugFix gym or hidden number
    warm_start_steps: int = 400  # gradient steps
    warm_start_batch_size: int | None = None  # episodes a step (None: the environment's)
    warm_start_learning_rate: float = 6e-3  # peak learning rate
    warm_start_observations: bool = True  # imitate tool output too
    d_model: int = 64  # width of the model
    n_layers: int = 2  # its blocks
    n_heads: int = 2  # its attention heads
    output: Path | None = None  # checkpoint to write (default: runs/tinyagent__<env>__<seed>.pt)


@torch.no_grad()
def sample_episode(model, tokenizer, env, task, *, seed, temperature=1.0):
    """One episode of the model in the environment, as a list of (who, text)."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    text, done = env.reset(task)[0], False
    cache = model.make_cache(1, longest_episode(env) + 1)
    episode, cached, pending = [("environment", text)], 0, list(tokenizer.encode(text))
    while not done:
        budgets = torch.tensor([env.turn_tokens], device=device)
        uniforms = torch.rand(1, env.turn_tokens, generator=generator)
        starts, stop_id = torch.tensor([cached], device=device), tokenizer.ids.get(env.stop)
        options = dict(budgets=budgets, stop_id=stop_id, temperature=temperature)
        messages, _ = sample_turn(model, cache, starts, [pending], uniforms, **options)
        cached += len(pending) + len(messages[0]) - 1  # the last one is not in it
        observation, _, done, _, _ = env.step(tokenizer.decode(messages[0]))
        episode += [("agent", tokenizer.decode(messages[0])), ("environment", observation)]
        pending = [messages[0][-1], *tokenizer.encode(observation)]
    return episode


def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def main(args):
    for name, value in vars(args).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not 0 <= value < math.inf or (value == 0 and name not in ("seed", "warm_start_steps")):
            default = getattr(Args, name)
            refuse(f"--{name.replace('_', '-')} {value} must be positive; the default is {default}")
    if args.d_model % (2 * args.n_heads):
        good = f"a multiple of twice --n-heads, e.g. --d-model {32 * args.n_heads}"
        refuse(f"--d-model {args.d_model} must be {good}")
    if args.cuda and not torch.cuda.is_available():
        refuse("--cuda: this machine has no usable GPU; run without --cuda")
    output = args.output or Path("runs") / f"tinyagent__{args.env_id}__{args.seed}.pt"
    try:  # before the training, not after it
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("ab").close()
    except OSError as error:
        refuse(f"--output {output}: {error.strerror}; try --output start.pt")
    device = torch.device("cuda" if args.cuda else "cpu")
    make_env = ENVS[args.env_id]
    env = make_env()
    tokenizer = Tokenizer(env.vocabulary())
    torch.manual_seed(args.seed)
    sizes = dict(d_model=args.d_model, n_layers=args.n_layers, n_heads=args.n_heads)
    model = TinyAgent(len(tokenizer.words), **sizes).to(device)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer.words)} words"
    )
    metrics = warm_start(model, tokenizer, make_env, args)
    print("  ".join(f"{key.split('/')[1]} {value:.4g}" for key, value in metrics.items()))
    task = env.task("dev", 0)
    for who, text in sample_episode(model, tokenizer, env, task, seed=args.seed):
        print(f"{who:>12}: " + text.replace("\n", "\n" + " " * 14))
    if not all(p.isfinite().all() for p in model.parameters()):
        sys.exit("error: weights are not finite and not saved; try --warm-start-learning-rate 6e-3")
    flags = {key: str(value) for key, value in vars(args).items()}
    torch.save({"model": model.state_dict(), "args": flags}, output)
    print(f"saved {output}")


if __name__ == "__main__":
    main(tyro.cli(Args))
