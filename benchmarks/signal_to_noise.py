"""Signal and noise of credit assignment on frozen policies, with the scripts' own functions.

    python benchmarks/signal_to_noise.py runs/*/checkpoint.pt    # of --num-iterations 0, 10, 50
    python benchmarks/signal_to_noise.py                         # the coin flips alone

For each checkpoint, the policy gradient of each credit scheme on many batches that share their
episodes. Unbiased over the batches: signal, the squared length of the mean gradient; noise, the
expected squared distance of one batch's gradient from it. Cosine: of one batch's gradient with the
mean of the leave-one-out gradient over the other batches. The last row is what
--no-mask-observations adds: the leave-one-out advantage on the tokens that the tools wrote. For
both kinds of token: how many an episode has, their mean log-probability, the length of one batch's
gradient.
"""

import csv
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gigpo  # noqa: E402
import ppo  # noqa: E402
import reinforce  # noqa: E402
from reinforce import ENVS, TinyAgent, Tokenizer, longest_episode  # noqa: E402


@dataclass
class Args:
    checkpoints: tyro.conf.Positional[tuple[Path, ...]] = ()  # checkpoint.pt files of runs
    batches: int = 32  # batches a checkpoint
    num_groups: int = 32  # groups in a batch
    group_size: int = 8  # episodes in a group
    csv: Path | None = None  # file to write the table to


def coin_flips(K, episodes=4000):
    """K fair coins, one a turn; heads on the first one pays 1. REINFORCE's gradient in the coins'
    logits. On paper, with the return minus its mean as credit, the first coordinate is 1/4 without
    noise and each other one has mean 0 and variance 1/16; with the reward-to-go the others are 0
    and the first one, without a baseline, has variance 1/16. Returns [(signal, noise)] of the two.
    """
    flips = torch.randint(2, (episodes, K), generator=torch.Generator().manual_seed(0)).double()
    rewards, turn_ids = torch.zeros(episodes, K).double(), torch.arange(K).expand(episodes, K)
    rewards[:, 0] = flips[:, 0]
    mask, logits = (
        torch.ones(episodes, K).double(),
        torch.zeros(episodes, K).double().requires_grad_(),
    )
    returns = (rewards, turn_ids, mask, torch.zeros(episodes))
    found = []
    for credit, baseline in (("episode", "mean"), ("turn", "none")):
        options = dict(credit=credit, gamma=1.0, baseline=baseline)
        advantages = reinforce.compute_advantages(*returns, **options)
        newlogprobs = torch.nn.functional.logsigmoid(torch.where(flips > 0, logits, -logits))
        inputs = (newlogprobs, mask, newlogprobs.detach(), advantages, mask, mask)
        loss, _ = reinforce.compute_loss(*inputs, kl_coef=0.0, ent_coef=0.0)
        (gradient,) = torch.autograd.grad(loss, logits)  # (episodes, K), each with its own logits
        found.append(((gradient.mean(0) ** 2).sum().item(), gradient.var(0).sum().item()))
    return found


def load_policy(path):
    """(model, tokenizer, make_env) of a checkpoint."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    flags = checkpoint["args"]
    options = {name: flags[name] for name in ("max_turns", "num_bugs")}
    make_env = partial(ENVS[flags["env_id"]], **options)
    tokenizer = Tokenizer(make_env().vocabulary())
    sizes = {name: flags[name] for name in ("d_model", "n_layers", "n_heads")}
    model = TinyAgent(len(tokenizer.words), **sizes)
    model.load_state_dict(checkpoint["model"])
    return model, tokenizer, make_env


def reinforce_advantages(batch, mask, baseline, credit="episode"):
    """REINFORCE's advantages (B, T) on the tokens in mask, undiscounted."""
    returns = (batch.rewards, batch.turn_ids, mask, batch.group_ids)
    return reinforce.compute_advantages(*returns, credit=credit, gamma=1.0, baseline=baseline)


def leave_one_out(batch, mask, credit="episode"):
    return reinforce_advantages(batch, mask, "loo", credit)


def schemes(batch, values):
    """{credit scheme: advantages (B, T)} of one batch; values: the critic's, of the state before
    each token."""
    found = {
        "return": reinforce_advantages(batch, batch.loss_mask, "none"),
        "return - batch mean": reinforce_advantages(batch, batch.loss_mask, "batch"),
        "return - leave-one-out": leave_one_out(batch, batch.loss_mask),
        "reward-to-go - leave-one-out": leave_one_out(batch, batch.loss_mask, credit="turn"),
    }
    turns = torch.tensor([[len(states)] for states in batch.anchors])
    turn_mask = torch.arange(batch.rewards.shape[1]) < turns
    G = gigpo.returns_to_go(batch.rewards, gamma=0.95)
    step = gigpo.step_advantages(G, turn_mask, batch.anchors, batch.group_ids, norm="none")
    step = step.gather(1, batch.turn_ids.clamp(min=0)) * batch.loss_mask
    found["GiGPO, step only"] = step
    found["GiGPO"] = found["return - leave-one-out"] + step
    rewards = ppo.token_rewards(batch.rewards, batch.turn_ids, batch.loss_mask)
    inputs = (rewards, values, batch.loss_mask, torch.zeros(len(rewards)))
    for unit, turn_ids in (("token", None), ("turn", batch.turn_ids)):
        options = dict(turn_ids=turn_ids, gamma=1.0, gae_lambda=0.95)
        found[f"GAE, {unit}"], _ = ppo.compute_gae(*inputs, **options)
    return found


def gradients(model, batch, mask, advantages, episodes=32):
    """The policy gradient of each scheme on the batch, {scheme: (P,)}: ascent on the mean over
    episodes of A log pi, summed over the tokens in mask. Also the mean log-probability of these
    tokens."""
    parameters, total, logprob = list(model.parameters()), {}, 0.0
    for rows in batch.lengths.argsort().split(episodes):
        length = batch.lengths[rows].max()
        part = mask[rows, :length]
        logprobs, entropy, _ = reinforce.score(model, batch.tokens[rows, :length], part, 1.0)
        logprob += logprobs.sum().item()
        weights = part / len(batch.tokens)
        for name, A in advantages.items():
            inputs = (logprobs, entropy, logprobs.detach(), A[rows, :length], part, weights)
            loss, _ = reinforce.compute_loss(*inputs, kl_coef=0.0, ent_coef=0.0)
            grads = torch.autograd.grad(loss, parameters, retain_graph=True)
            total[name] = total.get(name, 0) - torch.cat([g.flatten() for g in grads])
    return total, logprob / mask.sum().item()


def measure(path, args):
    """At a checkpoint: one row (dict) per scheme."""
    model, tokenizer, make_env = load_policy(path)
    env = make_env()
    context_length, num_tokens = longest_episode(env), env.max_turns * env.turn_tokens

    def play_batch(n):
        indices = range(10**9 + 1000 * n, 10**9 + 1000 * n + args.num_groups)
        tasks = [env.task("train", index) for index in indices]
        tasks = [task for task in tasks for _ in range(args.group_size)]
        envs = [make_env() for _ in tasks]
        group_ids = torch.arange(args.num_groups).repeat_interleave(args.group_size)
        uniforms = reinforce.draw_uniforms(7, n, len(tasks), num_tokens)
        inputs = (model, tokenizer, envs, tasks, group_ids, uniforms)
        return reinforce.rollout(*inputs, temperature=1.0, context_length=context_length)

    value_head = nn.Linear(model.embed.weight.shape[1], 1)
    nn.init.zeros_(value_head.weight)
    nn.init.zeros_(value_head.bias)
    critic_batches = [play_batch(10**6 + n) for n in range(2)]
    ppo.warm_up_critic(model, value_head, critic_batches, steps=300, gamma=1.0, turn_unit=False)
    found, seen = {}, {}
    for n in range(args.batches):
        batch = play_batch(n)
        R = batch.rewards.sum(1).view(args.num_groups, -1)
        values = torch.zeros_like(batch.loss_mask)
        with torch.no_grad():
            states = reinforce.score(model, batch.tokens, batch.loss_mask, 1.0)[2]
            values[batch.loss_mask > 0] = value_head(states)[:, 0]
        observed = (batch.turn_ids >= 0).float() - batch.loss_mask
        sampled, logprob = gradients(model, batch, batch.loss_mask, schemes(batch, values))
        tool_output = {"tool output": leave_one_out(batch, observed)}
        tools, observed_logprob = gradients(model, batch, observed, tool_output)
        for name, gradient in (sampled | tools).items():
            found.setdefault(name, []).append(gradient)
        numbers = {
            "success": sum(info["success"] for info in batch.infos) / len(batch.infos),
            "informative_groups": (R.amax(1) > R.amin(1)).float().mean().item(),
            "tokens": batch.loss_mask.sum(1).mean().item(),
            "logprob": logprob,
            "observed_tokens": observed.sum(1).mean().item(),
            "observed_logprob": observed_logprob,
        }
        for key, value in numbers.items():
            seen.setdefault(key, []).append(value)
    mean = {key: sum(values) / len(values) for key, values in seen.items()}
    M, reference = args.batches, torch.stack(found["return - leave-one-out"])
    others = (reference.sum(0) - reference) / (
        M - 1
    )  # (M, P) the mean gradient over the other batches
    rows = []
    for name, each in found.items():
        each, kind = torch.stack(each), "observed_" * (name in tools)
        noise = each.var(0).sum().item()
        row = {
            "checkpoint": str(path),
            "scheme": name,
            "success": mean["success"],
            "informative_groups": mean["informative_groups"],
            "signal": (each.mean(0) ** 2).sum().item() - noise / M,
            "noise": noise,
            "cosine": torch.cosine_similarity(each, others).mean().item(),
            "norm": each.norm(dim=1).mean().item(),
            "tokens": mean[kind + "tokens"],
            "logprob": mean[kind + "logprob"],
        }
        rows.append(row)
    return rows


def main(args):
    print("coin flips: signal 1/16 = 0.0625 in all; ", end="")
    print("noise (K - 1)/16 with the return, 1/16 with the reward-to-go")
    for K in (2, 5, 17):
        (signal, noise), (turn_signal, turn_noise) = coin_flips(K)
        first = f"return: signal {signal:.4f}, noise {noise:.4f} (paper {(K - 1) / 16:.4f})"
        second = f"reward-to-go: signal {turn_signal:.4f}, noise {turn_noise:.4f}"
        print(f"  K {K:2}: {first}; {second}")
    rows = []
    for path in args.checkpoints:
        found = measure(path, args)
        rows += found
        success, informative = found[0]["success"], found[0]["informative_groups"]
        print(
            f"\n{path}: success {success:.3f}, {informative:.3f} of the groups informative, ",
            end="",
        )
        print(f"{args.batches} batches of {args.num_groups} x {args.group_size}")
        columns = ("signal", "noise", "noise/signal", "cosine", "norm", "tokens", "logprob")
        print(f"  {'scheme':<30}" + "".join(f"{column:>13}" for column in columns))
        for row in found:
            visible = row["signal"] > 0  # or too few batches to see it
            ratio = {"noise/signal": row["noise"] / row["signal"] if visible else float("inf")}
            numbers = "".join(f"{(row | ratio)[column]:>13.4g}" for column in columns)
            print(f"  {row['scheme']:<30}{numbers}", flush=True)
        if args.csv:  # what is done is kept
            with open(args.csv, "w", newline="") as file:
                writer = csv.DictWriter(file, found[0])
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
