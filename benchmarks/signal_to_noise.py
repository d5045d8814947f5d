"""Signal and noise of credit assignment, measured on frozen policies with the scripts' own functions.

    python benchmarks/signal_to_noise.py runs/*/checkpoint.pt    # e.g. of --num-iterations 0, 10 and 50
    python benchmarks/signal_to_noise.py                         # the coin flips alone

For each checkpoint, the policy gradient of each credit scheme on many batches that share their episodes. Unbiased over
the batches: signal, the squared length of the mean gradient; noise, the expected squared distance of one batch's
gradient from it. Cosine: of one batch's gradient with the mean of the leave-one-out gradient over the other batches.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gigpo  # noqa: E402
import ppo  # noqa: E402
import reinforce  # noqa: E402
from reinforce import BugFixEnv, TinyAgent, Tokenizer, longest_episode  # noqa: E402


@dataclass
class Args:
    checkpoints: tyro.conf.Positional[tuple[Path, ...]] = ()  # checkpoint.pt files of BugFix runs
    batches: int = 32  # batches a checkpoint
    num_groups: int = 32  # groups in a batch
    group_size: int = 8  # episodes in a group
    csv: Path | None = None  # file to write the table to


def coin_flips(K, episodes=4000):
    """K fair coins, one a turn; heads on the first one pays 1. REINFORCE's gradient in the coins' logits. On paper,
    with the return minus its mean as credit, the first coordinate is 1/4 without noise and each other one has mean 0
    and variance 1/16; with the reward-to-go the others are 0 and the first one, without a baseline, has variance 1/16.
    Returns [(signal, noise)] of the two."""
    flips = torch.randint(2, (episodes, K), generator=torch.Generator().manual_seed(0)).double()
    rewards, turn_ids = torch.zeros(episodes, K).double(), torch.arange(K).expand(episodes, K)
    rewards[:, 0] = flips[:, 0]
    mask, logits = torch.ones(episodes, K).double(), torch.zeros(episodes, K).double().requires_grad_()
    found = []
    for credit, baseline in (("episode", "mean"), ("turn", "none")):
        advantages = reinforce.compute_advantages(rewards, turn_ids, mask, torch.zeros(episodes), credit=credit,
                                                  gamma=1.0, baseline=baseline)  # fmt: skip
        newlogprobs = torch.nn.functional.logsigmoid(torch.where(flips > 0, logits, -logits))
        loss, _ = reinforce.compute_loss(newlogprobs, mask, newlogprobs.detach(), advantages, mask, mask,
                                         kl_coef=0.0, ent_coef=0.0)  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, logits)  # (episodes, K): each episode has its own copy of the logits
        found.append(((gradient.mean(0) ** 2).sum().item(), gradient.var(0).sum().item()))
    return found


def load_policy(path):
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    flags, tokenizer = checkpoint["args"], Tokenizer(BugFixEnv.vocabulary())
    model = TinyAgent(len(tokenizer.words), **{name: flags[name] for name in ("d_model", "n_layers", "n_heads")})
    model.load_state_dict(checkpoint["model"])
    num_bugs = flags["num_bugs"]
    return model, tokenizer, dict(max_turns=flags["max_turns"] or BugFixEnv.default_turns(num_bugs), num_bugs=num_bugs)


def schemes(batch, values):
    """{credit scheme: advantages (B, T)} of one batch; values: the critic's, of the state before each token. Only the
    last turn pays in BugFix, so that reward-to-go and return are the same."""
    returns = (batch.rewards, batch.turn_ids, batch.loss_mask, batch.group_ids)
    found = {
        "return": reinforce.compute_advantages(*returns, credit="episode", gamma=1.0, baseline="none"),
        "return - batch mean": reinforce.compute_advantages(*returns, credit="episode", gamma=1.0, baseline="batch"),
        "return - leave-one-out": reinforce.compute_advantages(*returns, credit="episode", gamma=1.0, baseline="loo"),
    }
    turn_mask = torch.arange(batch.rewards.shape[1]) < torch.tensor([[len(states)] for states in batch.anchors])
    step = gigpo.step_advantages(gigpo.returns_to_go(batch.rewards, gamma=0.95), turn_mask, batch.anchors,
                                 batch.group_ids, norm="none")  # fmt: skip
    step = step.gather(1, batch.turn_ids.clamp(min=0)) * batch.loss_mask
    found["GiGPO, step only"], found["GiGPO"] = step, found["return - leave-one-out"] + step
    rewards = ppo.token_rewards(batch.rewards, batch.turn_ids, batch.loss_mask)
    for unit, turn_ids in (("token", None), ("turn", batch.turn_ids)):
        found[f"GAE, {unit}"], _ = ppo.compute_gae(rewards, values, batch.loss_mask, torch.zeros(len(rewards)),
                                                   turn_ids=turn_ids, gamma=1.0, gae_lambda=0.95)  # fmt: skip
    return found


def gradients(model, batch, advantages, episodes=32):
    """The policy gradient of each scheme on the batch, {scheme: (P,)}: ascent on the mean of A log pi over episodes."""
    parameters, total = list(model.parameters()), {}
    for rows in batch.lengths.argsort().split(episodes):
        length = batch.lengths[rows].max()
        mask = batch.loss_mask[rows, :length]
        logprobs, entropy, _ = reinforce.score(model, batch.tokens[rows, :length], mask, 1.0)
        for name, A in advantages.items():
            loss, _ = reinforce.compute_loss(logprobs, entropy, logprobs.detach(), A[rows, :length], mask,
                                             mask / len(batch.tokens), kl_coef=0.0, ent_coef=0.0)  # fmt: skip
            grads = torch.autograd.grad(loss, parameters, retain_graph=True)
            total[name] = total.get(name, 0) - torch.cat([g.flatten() for g in grads])
    return total


def measure(path, args):
    """{scheme: (signal, noise, mean cosine)} at a checkpoint, success rate, share of groups with unequal returns."""
    model, tokenizer, options = load_policy(path)
    context_length = longest_episode(BugFixEnv, options["max_turns"])

    def play_batch(n):
        tasks = [BugFixEnv.task("train", 10**9 + 1000 * n + g, options["num_bugs"]) for g in range(args.num_groups)]
        tasks = [task for task in tasks for _ in range(args.group_size)]
        group_ids = torch.arange(args.num_groups).repeat_interleave(args.group_size)
        uniforms = reinforce.draw_uniforms(7, n, len(tasks), options["max_turns"] * BugFixEnv.turn_tokens)
        return reinforce.rollout(model, tokenizer, [BugFixEnv(**options) for _ in tasks], tasks, group_ids, uniforms,
                                 temperature=1.0, context_length=context_length)  # fmt: skip

    value_head = nn.Linear(model.embed.weight.shape[1], 1)
    nn.init.zeros_(value_head.weight), nn.init.zeros_(value_head.bias)
    ppo.warm_up_critic(model, value_head, [play_batch(10**6 + n) for n in range(2)], steps=300, gamma=1.0,
                       turn_unit=False)  # fmt: skip
    found, success, informative = {}, [], []
    for n in range(args.batches):
        batch = play_batch(n)
        R = batch.rewards.sum(1).view(args.num_groups, -1)
        informative.append((R.amax(1) > R.amin(1)).float().mean().item())
        success.append(sum(info["success"] for info in batch.infos) / len(batch.infos))
        values = torch.zeros_like(batch.loss_mask)
        with torch.no_grad():
            states = reinforce.score(model, batch.tokens, batch.loss_mask, 1.0)[2]
            values[batch.loss_mask > 0] = value_head(states)[:, 0]
        for name, gradient in gradients(model, batch, schemes(batch, values)).items():
            found.setdefault(name, []).append(gradient)
    M, reference = args.batches, torch.stack(found["return - leave-one-out"])
    others = (reference.sum(0) - reference) / (M - 1)  # (M, P) the mean gradient over the other batches
    table = {}
    for name, each in found.items():
        each = torch.stack(each)
        noise = each.var(0).sum().item()
        table[name] = ((each.mean(0) ** 2).sum().item() - noise / M, noise,
                       torch.cosine_similarity(each, others).mean().item())  # fmt: skip
    return table, sum(success) / M, sum(informative) / M


def main(args):
    print("coin flips: signal 1/16 = 0.0625 in all; noise (K - 1)/16 with the return, 1/16 with the reward-to-go")
    for K in (2, 5, 17):
        (signal, noise), (turn_signal, turn_noise) = coin_flips(K)
        print(f"  K {K:2}: return: signal {signal:.4f}, noise {noise:.4f} (paper {(K - 1) / 16:.4f}); "
              f"reward-to-go: signal {turn_signal:.4f}, noise {turn_noise:.4f}")  # fmt: skip
    rows = []
    for path in args.checkpoints:
        table, success, informative = measure(path, args)
        print(f"\n{path}: success {success:.3f}, {informative:.3f} of the groups informative, "
              f"{args.batches} batches of {args.num_groups} x {args.group_size}")  # fmt: skip
        print(f"  {'scheme':<26}{'signal':>11}{'noise':>11}{'noise/signal':>14}{'cosine':>9}")
        for name, (signal, noise, cosine) in table.items():
            ratio = f"{noise / signal:.2f}" if signal > 0 else "-"  # too few batches to tell the signal from 0
            print(f"  {name:<26}{signal:>11.3g}{noise:>11.3g}{ratio:>14}{cosine:>9.3f}", flush=True)
            rows.append([str(path), f"{success:.4f}", f"{informative:.4f}", name, *map("{:.5g}".format, table[name])])
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["checkpoint", "success", "informative_groups", "scheme", "signal", "noise", "cosine"])
            writer.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
