"""Model, sampling, rollout and evaluation: which ids are stored, which are trained, what each episode's record says.

Most tests script the policy: the uniforms carry the ids to sample, and a sampler put in the place of grpo.sample_tokens
reads them. Everything else, the indexing of the uniforms included, is the real rollout.
"""

import copy
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo  # noqa: E402
from grpo import TASK_0, BugFixEnv, NumberEnv  # noqa: E402

torch.set_num_threads(1)  # these models are too small to share

READ, TEST, SUBMIT = "<call> read </call>", "<call> test </call>", "<call> submit </call>"
RIGHT, HACK = "<call> edit swap_minmax </call>", "<call> edit hardcode_tests </call>"
SOLVED = TASK_0._replace(source=TASK_0.fix)
TOKENIZERS = {
    env_class: grpo.Tokenizer(env_class.vocabulary()) for env_class in (BugFixEnv, NumberEnv)
}
WORDS = TOKENIZERS[BugFixEnv]
encode = WORDS.encode


def random_model(env_class=BugFixEnv, seed=0):
    """A TinyAgent whose every matrix matters (at its start the blocks are the identity and attention goes untested),
    and that closes a message, or calls and answers, now and then, so that episodes differ in length."""
    torch.manual_seed(seed)
    tokenizer = TOKENIZERS[env_class]
    model = grpo.TinyAgent(len(tokenizer.words), d_model=16, n_layers=2, n_heads=2)
    bias = torch.zeros(len(tokenizer.words))
    number = {" call": 4.0, " ans": 4.0} | {f" {x}": 2.0 for x in range(8)}
    wanted = {" </call>": 5.0} if env_class is BugFixEnv else number
    for word, value in wanted.items():
        bias[tokenizer.ids[word]] = value
    model.head.bias = torch.nn.Parameter(bias)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


class SpyEnv(BugFixEnv):
    """Counts its steps and keeps what it was told and what it said."""

    def reset(self, task):
        self.actions, self.said, self.paid = [], [], []
        observation, info = super().reset(task)
        self.said.append(observation)
        return observation, info

    def step(self, action):
        self.actions.append(action)
        result = super().step(action)
        self.said.append(result[0]), self.paid.append(result[1])
        return result


def play_script(monkeypatch, scripts, tasks, *, env_class=SpyEnv, max_turns=6, context_length=1200, model=None,
                temperature=1.0, filler=" read", **options):  # fmt: skip
    """Rolls out episodes whose messages (texts, or lists of ids) are scripted; where a script is silent, `filler` is
    sampled. Returns (batch, envs)."""
    base = NumberEnv if issubclass(env_class, NumberEnv) else BugFixEnv
    tokenizer = TOKENIZERS[base]
    V, size = len(tokenizer.words), env_class.turn_tokens
    ids = torch.full(
        (len(scripts), max_turns * size), tokenizer.ids[" ?" if base is NumberEnv else filler]
    )
    for row, messages in enumerate(scripts):
        for turn, message in enumerate(messages[:max_turns]):
            message = list(tokenizer.encode(message) if isinstance(message, str) else message)[
                :size
            ]
            ids[row, turn * size : turn * size + len(message)] = torch.tensor(
                message, dtype=torch.int64
            )

    def sampler(logits, uniforms, temperature):
        chosen = (uniforms.double() * V).long()
        return chosen, F.log_softmax(logits / (temperature or 1.0), -1).gather(1, chosen[:, None])[
            :, 0
        ]

    monkeypatch.setattr(grpo, "sample_tokens", sampler)
    envs = [env_class(max_turns=max_turns, **options) for _ in scripts]
    batch = grpo.rollout(model or random_model(base), tokenizer, envs, tasks, torch.arange(len(envs)), (ids + 0.5) / V,
                         temperature=temperature, context_length=context_length)  # fmt: skip
    return batch, envs


def reference(env, task, messages, context_length):
    """The grammar in plain Python: the prompt, then each message and its observation. The closing token ends a message,
    and nothing stands between the two. Returns (ids, mask, turn ids, rewards, end)."""
    tokenizer = WORDS
    ids = list(tokenizer.encode(env.reset(task)[0]))[:context_length]
    mask, turns, rewards = [0] * len(ids), [-1] * len(ids), []
    for turn, message in enumerate(messages):
        message = message[: env.turn_tokens]
        if tokenizer.ids[env.stop] in message:
            message = message[: message.index(tokenizer.ids[env.stop]) + 1]
        part = message[: context_length - len(ids)]
        ids, mask, turns = ids + part, mask + [1] * len(part), turns + [turn] * len(part)
        if len(part) < len(message):
            return ids, mask, turns, rewards, "context_limit"
        observation, reward, done, _, info = env.step(tokenizer.decode(message))
        rewards.append(reward)
        if done:
            return ids, mask, turns, rewards, info["end"]
        part = list(tokenizer.encode(observation))[: context_length - len(ids)]
        ids, mask, turns = ids + part, mask + [0] * len(part), turns + [turn] * len(part)
    raise AssertionError("the episode did not end")


def episode(batch, row):
    n = batch.lengths[row]
    return (
        batch.tokens[row, :n].tolist(),
        batch.loss_mask[row, :n].tolist(),
        batch.turn_ids[row, :n].tolist(),
    )


def sampled(batch, row, turn):
    """The ids that the batch says were sampled in a turn."""
    return batch.tokens[row][(batch.loss_mask[row] > 0) & (batch.turn_ids[row] == turn)].tolist()


def rollout(
    model, tasks, uniforms, *, env_class=BugFixEnv, temperature=1.0, context_length=1200, **options
):
    envs = [env_class(**options) for _ in tasks]
    return grpo.rollout(model, TOKENIZERS[env_class], envs, tasks, torch.arange(len(tasks)), uniforms,
                        temperature=temperature, context_length=context_length)  # fmt: skip


# ---- Which ids are stored and trained ----------------------------------------------------------------------------


def test_stored_sequence_is_prompt_samples_and_observations(monkeypatch):
    """Catches history that is decoded and encoded again (field report 1): encode sees the environment's texts only."""
    encoded = []
    monkeypatch.setattr(WORDS, "encode", lambda text: encoded.append(text) or encode(text))
    garbage = [WORDS.ids[word] for word in (" max", "(", "<pad>", "max", " <call>", " min")]
    script = [list(encode(READ)), garbage, list(encode(SUBMIT))]
    batch, (env,) = play_script(monkeypatch, [script], [TASK_0])
    assert WORDS.decode(garbage) == env.actions[1]
    expected = [
        *encode(env.said[0]),
        *script[0],
        *encode(env.said[1]),
        *garbage,
        *encode(env.said[2]),
        *script[2],
    ]
    assert batch.tokens[0].tolist() == expected
    assert set(encoded) <= set(env.said), "text with model output was encoded"


@pytest.mark.parametrize("context_length", [1, 7, 18, 21, 22, 24, 26, 40, 75, 120, 1200])
def test_random_episodes_equal_the_reference_grammar(monkeypatch, context_length):
    """Catches mask, turn ids or log-probs of another length than the ids, a lost or added separator, a context cut in
    the wrong place (field reports 2, 97): 220 episodes of valid, wrong, empty, unclosed and overlong messages."""
    rng = np.random.default_rng(context_length)
    calls = [
        READ,
        TEST,
        SUBMIT,
        RIGHT,
        HACK,
        "<call> read read </call>",
        "<call> </call>",
        " </call>",
    ]
    scripts, tasks, stop = [], [], WORDS.ids[BugFixEnv.stop]
    for row in range(20):
        script = []
        for turn in range(6):
            noise = rng.integers(0, len(WORDS.words), 6).tolist()
            kind = rng.integers(4)
            call = list(encode(calls[rng.integers(len(calls))]))
            script.append(
                noise if kind == 0 else [*noise[:5], stop] if kind == 1 else (call + noise)[:6]
            )
        scripts.append(script)
        tasks.append(grpo.bugfix_task("train", row) if row % 4 else TASK_0)
    batch, envs = play_script(monkeypatch, scripts, tasks, context_length=context_length)
    assert (
        batch.tokens.shape == batch.loss_mask.shape == batch.logprobs.shape == batch.turn_ids.shape
    )
    assert (
        batch.tokens.dtype == torch.int64
        and batch.tokens.shape[1] == batch.lengths.max() <= context_length
    )
    for row, (script, task, env) in enumerate(zip(scripts, tasks, envs)):
        ids, mask, turns, rewards, end = reference(
            BugFixEnv(max_turns=6), task, script, context_length
        )
        assert episode(batch, row) == (ids, mask, turns)
        assert batch.infos[row]["end"] == end and batch.infos[row]["turns"] == len(rewards) == len(
            env.actions
        )
        assert batch.rewards[row].tolist() == pytest.approx(rewards + [0.0] * (6 - len(rewards)))
        assert batch.truncated[row] == (end == "context_limit") and batch.terminated[row] == (
            end != "context_limit"
        )
        padding = slice(batch.lengths[row], None)
        assert not batch.loss_mask[row, padding].any() and not batch.logprobs[row, padding].any()
        assert not batch.tokens[row, padding].any() and (batch.turn_ids[row, padding] == -1).all()
        assert (batch.logprobs[row][batch.loss_mask[row] > 0] < 0).all()
        assert len(batch.anchors[row]) == len(rewards)


@pytest.mark.parametrize(
    "context_length, temperature", [(1200, 1.0), (200, 0.7), (30, 1.0), (1200, 0)]
)
def test_mask_is_one_exactly_on_what_the_real_sampler_returned(
    monkeypatch, context_length, temperature
):
    """Catches masks on harness ids, sampled ids without mask, noise of another row or position (field report 2)."""
    drawn, real = {}, grpo.sample_tokens

    def spy(logits, uniforms, temperature):
        ids, logprobs = real(logits, uniforms, temperature)
        drawn.update(
            {u: (i, p) for u, i, p in zip(uniforms.tolist(), ids.tolist(), logprobs.tolist())}
        )
        return ids, logprobs

    monkeypatch.setattr(grpo, "sample_tokens", spy)
    uniforms = (
        torch.randperm(16 * 36, generator=torch.Generator().manual_seed(3)).view(16, 36) / 576
    )  # no two equal
    tasks = [grpo.bugfix_task("train", i) for i in range(16)]
    batch = rollout(
        random_model(), tasks, uniforms, context_length=context_length, temperature=temperature
    )
    for row in range(16):
        for turn in range(6):
            ids = sampled(batch, row, turn)
            expected = [drawn[u] for u in uniforms[row, turn * 6 : turn * 6 + len(ids)].tolist()]
            assert ids == [i for i, _ in expected]
            where = (batch.loss_mask[row] > 0) & (batch.turn_ids[row] == turn)
            assert batch.logprobs[row][where].tolist() == [p for _, p in expected]
            if len(ids) < 6 and turn < batch.infos[row]["turns"]:
                assert ids[-1] == WORDS.ids[" </call>"], (
                    "a turn ended early without its closing token"
                )


def test_closing_token_is_trained_and_nothing_is_forced(monkeypatch):
    """Catches a closing token that is masked, added by the harness, or taken for the row's end (reports 12, 15, 16)."""
    unclosed = list(encode("<call> edit swap_minmax read test"))
    script = [READ, unclosed + [WORDS.ids[" read"]], TEST, SUBMIT]
    batch, (env,) = play_script(monkeypatch, [script], [TASK_0])
    stop = WORDS.ids[" </call>"]
    assert [sampled(batch, 0, turn)[-1] == stop for turn in range(4)] == [True, False, True, True]
    assert [len(sampled(batch, 0, turn)) for turn in range(4)] == [
        3,
        6,
        3,
        3,
    ] and batch.loss_mask.sum() == 15
    assert env.actions[1] == "<call> edit swap_minmax read test read"
    assert env.said[2] == "<result>error: malformed</result>"
    assert (batch.tokens[0] == stop).sum() == 3, "the harness added a closing token"
    harness = batch.tokens[0][batch.loss_mask[0] == 0].tolist()
    assert harness == [i for text in env.said[:-1] for i in encode(text)]


def test_a_sampled_padding_id_is_a_token(monkeypatch):
    """Catches padding that is guessed from ids (field report 15): <pad> has id 0, and the policy may sample it."""
    batch, _ = play_script(
        monkeypatch, [[[0] * 6, [0] * 6], [SUBMIT]], [TASK_0, TASK_0], max_turns=2
    )
    assert (
        sampled(batch, 0, 0) == sampled(batch, 0, 1) == [0] * 6 and batch.loss_mask[0].sum() == 12
    )
    assert batch.lengths.tolist() == [len(batch.tokens[0]), len(encode(TASK_0.issue)) + 3]


def test_a_policy_that_goes_on_after_its_call_is_stopped_there(monkeypatch):
    """Catches an invented observation that stays in the context or is executed (field report 14)."""
    fake = list(encode(READ)) + list(encode("<result>PASS"))
    assert len(fake) > 3
    batch, (env,) = play_script(monkeypatch, [[fake, SUBMIT]], [TASK_0], filler="<call>")
    assert env.actions == [READ, SUBMIT] and sampled(batch, 0, 0) == list(encode(READ))
    assert WORDS.decode(batch.tokens[0].tolist()) == TASK_0.issue + READ + env.said[1] + SUBMIT


def test_hidden_number_layout(monkeypatch):
    """Catches any other layout, mask, turn ids or return than the documented example."""
    scripts = [[" call 3", " call 5", " ans 4"], [" ans 4"]]
    batch, _ = play_script(monkeypatch, scripts, [4, 4], env_class=NumberEnv, max_turns=5)
    text = TOKENIZERS[NumberEnv].decode(batch.tokens[0].tolist())
    assert text == "<bos> ? call 3 <tool> higher call 5 <tool> lower ans 4"
    assert batch.loss_mask[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert batch.turn_ids[0].tolist() == [-1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert batch.rewards[0].tolist() == pytest.approx([-0.05, -0.05, 1, 0, 0])
    assert batch.rewards[0].sum().item() == pytest.approx(0.9)
    assert batch.anchors == [[(0, 7), (4, 7), (4, 4)], [(0, 7)]]
    assert (
        batch.lengths.tolist() == [12, 4] and batch.terminated.all() and not batch.truncated.any()
    )
    assert [(info["turns"], info["tool_calls"], info["errors"]) for info in batch.infos] == [
        (3, 2, 0),
        (1, 0, 0),
    ]
    assert all(info["success"] and info["end"] == "submitted" for info in batch.infos)


# ---- Rewards, ends and infos -------------------------------------------------------------------------------------


def test_stored_rewards_sum_to_the_environments_return(monkeypatch):
    """Catches rewards that are overwritten, shifted by a turn or lost with a final observation (reports 10, 32)."""
    scripts = [
        [READ, TEST, RIGHT, TEST, SUBMIT],
        [READ, HACK, SUBMIT],
        [TEST] * 6,
        ["read"] * 6,
        [SUBMIT],
    ]
    batch, envs = play_script(
        monkeypatch, scripts, [TASK_0] * 5, tool_cost=0.25, process_reward=0.5
    )
    for row, env in enumerate(envs):
        assert batch.rewards[row].tolist() == env.paid + [0.0] * (6 - len(env.paid))
    assert batch.rewards[0].sum() == 4 * 0.25 + 1.5


def test_infos(monkeypatch):
    """Catches counts that mix up tools, errors and turns, or a hack that is reported as success."""
    scripts = [
        [READ, TEST, "<call> edit swap_andor </call>", RIGHT, SUBMIT],
        [HACK, SUBMIT],
        ["read"] * 6,
    ]
    batch, _ = play_script(monkeypatch, scripts, [TASK_0, TASK_0, SOLVED], reward="public")
    keys = ("end", "success", "hacked", "turns", "tool_calls", "errors", "pair")
    assert [[info[key] for key in keys] for info in batch.infos] == [
        ["submitted", True, False, 5, 2, 1, "clamp:swap_minmax"],
        ["submitted", False, True, 2, 0, 0, "clamp:swap_minmax"],
        ["turn_limit", False, False, 6, 0, 6, "clamp:swap_minmax"],
    ]
    assert batch.infos[0]["tools"] == ["read", "test", "edit", "edit", "submit"]
    assert batch.rewards.sum(1).tolist() == [1, 1, 0]


def test_group_ids_are_kept():
    """Catches groups taken from positions: any ids in any order stay with their rows."""
    envs, group_ids = [NumberEnv() for _ in range(4)], torch.tensor([7, 2, 7, 2])
    batch = grpo.rollout(random_model(NumberEnv), TOKENIZERS[NumberEnv], envs, [1, 1, 1, 2], group_ids,
                         grpo.draw_uniforms(1, 1, 4, 10), temperature=1.0, context_length=30)  # fmt: skip
    assert torch.equal(batch.group_ids, group_ids)


@pytest.mark.parametrize("message", ["read", TEST, "<call> submit submit </call>"])
@pytest.mark.parametrize("max_turns", [1, 3, 6])
def test_endless_policies_end_at_max_turns(monkeypatch, message, max_turns):
    """Catches a tool loop without end (field report 70); the limit terminates, it does not truncate."""
    batch, (env,) = play_script(monkeypatch, [[message] * 9], [TASK_0], max_turns=max_turns)
    assert len(env.actions) == batch.infos[0]["turns"] == max_turns
    assert batch.infos[0]["end"] == "turn_limit" and not batch.rewards.any()
    assert batch.terminated[0] and not batch.truncated[0]


def test_one_turn_allows_one_action_and_its_reward(monkeypatch):
    """Catches a turn limit that is checked before the reward is stored (field report 70)."""
    batch, _ = play_script(monkeypatch, [[SUBMIT]], [SOLVED], max_turns=1)
    assert (
        batch.rewards.tolist() == [[1.0]]
        and batch.infos[0]["end"] == "submitted"
        and batch.infos[0]["success"]
    )


def test_finished_episodes_get_no_further_step(monkeypatch):
    """Catches finished episodes that go on acting in the batch (field report 71)."""
    batch, envs = play_script(
        monkeypatch, [[SUBMIT], [TEST] * 6, [READ, SUBMIT], [SUBMIT]], [TASK_0] * 4
    )
    assert [len(env.actions) for env in envs] == [1, 6, 2, 1]
    for row, turns in enumerate((1, 6, 2, 1)):
        assert (
            batch.turn_ids[row].max() == turns - 1
            and not batch.loss_mask[row, batch.lengths[row] :].any()
        )
        assert batch.lengths[row] == sum(
            len(encode(text)) for text in envs[row].actions + envs[row].said[:-1]
        )


def test_context_overflow_in_an_observation(monkeypatch):
    """Catches a crash, an overflow called invalid, terminated or success, a dropped last observation (report 22)."""
    prompt, read = len(encode(TASK_0.issue)), list(encode(READ))
    for room in (0, 1, 5):
        batch, (env,) = play_script(
            monkeypatch, [[READ, SUBMIT]], [SOLVED], context_length=prompt + len(read) + room
        )
        info = batch.infos[0]
        assert batch.truncated.tolist() == [True] and batch.terminated.tolist() == [False]
        assert (info["end"], info["turns"], info["errors"], info["success"]) == (
            "context_limit",
            1,
            0,
            False,
        )
        assert batch.tokens[0].tolist() == [
            *encode(TASK_0.issue),
            *read,
            *encode(env.said[1])[:room],
        ]
        assert batch.loss_mask[0].tolist() == [0] * prompt + [1] * len(read) + [0] * room
        assert (
            batch.turn_ids[0].tolist() == [-1] * prompt + [0] * (len(read) + room)
            and not batch.rewards.any()
        )


def test_context_overflow_in_a_message(monkeypatch):
    """Catches a message cut by the context but executed or called malformed, and a reward lost on the last token."""
    whole = [
        len(encode(text))
        for text in (TASK_0.issue, RIGHT, "<result>edited with swap_minmax</result>", SUBMIT)
    ]
    for missing, end in (
        (0, "submitted"),
        (1, "context_limit"),
        (2, "context_limit"),
        (3, "context_limit"),
    ):
        batch, (env,) = play_script(
            monkeypatch, [[RIGHT, SUBMIT]], [TASK_0], context_length=sum(whole) - missing
        )
        info = batch.infos[0]
        assert (
            info["end"] == end
            and batch.truncated[0] == (missing > 0)
            and batch.lengths[0] == sum(whole) - missing
        )
        assert info["success"] == (missing == 0) and batch.rewards.sum() == (missing == 0)
        assert env.actions == [RIGHT, SUBMIT][: 2 - (missing > 0)] and info["errors"] == 0
        assert sampled(batch, 0, 1) == list(encode(SUBMIT))[: 3 - missing]


class RaisingEnv(SpyEnv):
    def step(self, action):
        raise OSError("disk full")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_raises_naming_the_episode(monkeypatch, reward):
    """Catches a NaN or None reward that turns into 0 or into the whole group's NaN."""

    class BadEnv(SpyEnv):
        def step(self, action):
            observation, paid, *rest = super().step(action)
            return observation, reward if self.task is SOLVED else paid, *rest

    with pytest.raises(ValueError, match="episode 1 .*clamp:swap_minmax"):
        play_script(monkeypatch, [[READ, SUBMIT]] * 3, [TASK_0, SOLVED, TASK_0], env_class=BadEnv)


def test_an_environment_that_raises_stops_the_run(monkeypatch):
    """Catches an infrastructure failure that becomes an honest-looking reward 0 (field report 66)."""
    with pytest.raises(OSError, match="disk full"):
        play_script(monkeypatch, [[READ]], [TASK_0], env_class=RaisingEnv)


# ---- Scores, caches and batches ----------------------------------------------------------------------------------


def test_full_forward_equals_cached_decoding():
    """Catches a prefill without causal mask, wrong slots or positions (field report 20)."""
    model = random_model()
    tokens = torch.randint(len(WORDS.words), (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full, cache, parts = model(tokens), model.make_cache(3, 41), []
        for a, b in [
            (0, 10),
            *((i, i + 1) for i in range(10, 15)),
            (15, 27),
            *((i, i + 1) for i in range(27, 40)),
        ]:
            parts.append(model(tokens[:, a:b], cache, torch.arange(a, b).expand(3, -1)))
        assert (torch.cat(parts, 1) - full).abs().max() < 1e-4
        assert (model.head(model(tokens, return_hidden=True)) - full).abs().max() < 1e-5
        at = torch.tensor([[7, 39], [0, 20], [5, 5]])  # these positions only
        expected = full[torch.arange(3)[:, None], at]
        assert (model(tokens, at=at) - expected).abs().max() < 1e-5
        cached = model(tokens, model.make_cache(3, 41), torch.arange(40).expand(3, -1), at=at)
        assert (cached - expected).abs().max() < 1e-4
        changed = tokens.clone()
        changed[:, 20:] = 1
        assert (model(changed)[:, :20] - full[:, :20]).abs().max() < 1e-5, "a token sees later ones"
        assert (model(changed)[:, 20:] - full[:, 20:]).abs().max() > 0.1, (
            "the model does not depend on its input"
        )


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_equals_the_rollouts_logprobs(monkeypatch, temperature, scripted):
    """Catches a temperature in one place only, shifted rows, other positions in cache and forward (reports 6, 17, 18),
    for episodes of all lengths, cut ones too, with observations scored or not."""
    tasks, model = [grpo.bugfix_task("train", i) for i in range(12)], random_model()
    for context_length in (1200, 60):
        if scripted:
            scripts = [[READ, TEST, RIGHT, "read", TEST, SUBMIT][i % 6 :] for i in range(12)]
            batch, _ = play_script(monkeypatch, scripts, tasks, model=model, temperature=temperature,
                                   context_length=context_length)  # fmt: skip
        else:
            batch = rollout(model, tasks, grpo.draw_uniforms(2, 1, 12, 24), temperature=temperature, max_turns=4,
                            context_length=context_length)  # fmt: skip
        for mask in (batch.loss_mask, (batch.turn_ids >= 0).float()):
            with torch.no_grad():
                logprobs, entropy, _ = grpo.score(model, batch.tokens, mask, temperature)
            difference = (logprobs - batch.logprobs)[batch.loss_mask > 0]
            assert difference.abs().max() < 1e-4 and (difference.exp() - 1).abs().max() < 1e-4
            assert (
                not logprobs[mask == 0].any()
                and not entropy[mask == 0].any()
                and (entropy[mask > 0] > 0).all()
            )
            assert (logprobs[mask > 0] < 0).all() and not batch.logprobs[batch.loss_mask == 0].any()
        other, _, _ = grpo.score(model, batch.tokens, batch.loss_mask, temperature * 0.8)
        assert (other - batch.logprobs)[batch.loss_mask > 0].abs().max() > 0.1, (
            "the model is blind to this"
        )


def test_sampler_draws_at_the_temperature():
    """Catches a sampler that ignores the temperature, draws a token of probability 0, or returns another log-prob."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    for temperature in (1.0, 0.7, 2.0):
        uniforms = (torch.arange(20000) + 0.5) / 20000
        ids, logprobs = grpo.sample_tokens(logits.expand(20000, -1), uniforms, temperature)
        expected = F.softmax(logits[0] / temperature, -1)
        assert torch.allclose(torch.bincount(ids, minlength=4) / 20000, expected, atol=2e-4)
        assert torch.allclose(logprobs.exp(), expected[ids], atol=1e-6)
    edges = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, -1)
    assert grpo.sample_tokens(edges, torch.tensor([0.0, 0.49, 0.5, 1 - 2**-24]), 1.0)[
        0
    ].tolist() == [1, 1, 3, 3]
    assert grpo.sample_tokens(logits.expand(2, -1), torch.tensor([0.0, 0.9]), 0)[0].tolist() == [
        2,
        2,
    ]


def test_score_alone_equals_score_beside_a_longer_episode(monkeypatch):
    """Catches padding that shifts positions or is attended to (field report 21)."""
    model = random_model()
    batch, _ = play_script(
        monkeypatch, [[SUBMIT], [READ, TEST, HACK, READ, TEST, SUBMIT]], [TASK_0] * 2, model=model
    )
    n = batch.lengths[0]
    assert batch.lengths[1] > 3 * n
    together = grpo.score(model, batch.tokens, batch.loss_mask, 1.0)
    alone = grpo.score(model, batch.tokens[:1, :n], batch.loss_mask[:1, :n], 1.0)
    for a, b in zip(together[:2], alone[:2]):
        assert (a[:1, :n] - b).abs().max() < 1e-5


BATCHES = [(BugFixEnv, 4, 1200), (BugFixEnv, 6, 70), (NumberEnv, 5, 30)]


@pytest.mark.parametrize("env_class, max_turns, context_length", BATCHES)
def test_episodes_do_not_depend_on_their_batch(env_class, max_turns, context_length):
    """Catches noise tied to a place in the batch, rows that write into each other's cache (report 21)."""
    model, B = random_model(env_class), 16
    tasks = [env_class.task("train", i) for i in range(B)]
    uniforms = grpo.draw_uniforms(4, 1, B, max_turns * env_class.turn_tokens)
    options = dict(
        env_class=env_class, max_turns=max_turns, malformed="error", context_length=context_length
    )
    whole = rollout(model, tasks, uniforms, **options)
    assert len(set(whole.lengths.tolist())) > 1
    order = torch.randperm(B, generator=torch.Generator().manual_seed(0)).tolist()
    for rows in (order, *torch.tensor(order).split(6), [7]):
        rows = [int(row) for row in rows]
        part = rollout(model, [tasks[row] for row in rows], uniforms[rows], **options)
        for i, row in enumerate(rows):
            assert episode(part, i) == episode(whole, row), f"row {row}"
            n = part.lengths[i]
            assert (part.logprobs[i, :n] - whole.logprobs[row, :n]).abs().max() < 1e-4
            assert (
                torch.equal(part.rewards[i], whole.rewards[row])
                and part.anchors[i] == whole.anchors[row]
            )
            assert {**part.infos[i], "env_seconds": 0} == {**whole.infos[row], "env_seconds": 0}


def test_rows_that_finish_at_different_times_do_not_disturb_each_other(monkeypatch):
    """Catches cache rows mixed up when finished episodes leave, with messages and observations of many lengths."""
    model, rng = random_model(), random.Random(0)
    calls = [READ, TEST, HACK, "<call> edit swap_order </call>", "read", "<call> read"]
    scripts = [
        [rng.choice(calls) for _ in range(n)] + [SUBMIT] for n in (0, 5, 1, 4, 2, 3, 0, 5, 5)
    ]
    tasks = [grpo.bugfix_task("train", i) for i in range(len(scripts))]
    whole, _ = play_script(monkeypatch, scripts, tasks, model=model)
    for row, (script, task) in enumerate(zip(scripts, tasks)):
        alone, _ = play_script(monkeypatch, [script], [task], model=model)
        n = alone.lengths[0]
        assert episode(alone, 0) == episode(whole, row)
        assert (alone.logprobs[0, :n] - whole.logprobs[row, :n]).abs().max() < 1e-4


# ---- Noise, transcript, evaluation -------------------------------------------------------------------------------


def test_a_group_is_not_one_completion_copied():
    """Catches members that share their noise (field report 96)."""
    torch.manual_seed(0)
    model = grpo.TinyAgent(len(WORDS.words), d_model=16, n_layers=1, n_heads=2)
    batch = rollout(model, [TASK_0] * 8, grpo.draw_uniforms(1, 1, 8, 12), max_turns=2)
    assert len({tuple(sampled(batch, row, 0)) for row in range(8)}) >= 6
    assert len({tuple(sampled(batch, row, turn)) for row in range(8) for turn in range(2)}) >= 12, (
        "turns share noise"
    )


def test_uniforms_are_keyed_by_seed_iteration_row_and_position():
    """Catches streamed noise: it must depend on its key, not on a generator's past or on how many rows are drawn."""
    expected, state = grpo.draw_uniforms(3, 7, 32, 36), torch.get_rng_state()
    torch.rand(5), np.random.rand(3)
    assert torch.equal(grpo.draw_uniforms(3, 7, 32, 36), expected)
    torch.set_rng_state(state)
    assert torch.equal(grpo.draw_uniforms(3, 7, 20, 36), expected[:20]) and torch.equal(
        torch.get_rng_state(), state
    )
    for other in (
        grpo.draw_uniforms(4, 7, 32, 36),
        grpo.draw_uniforms(3, 8, 32, 36),
        grpo.draw_uniforms(7, 3, 32, 36),
    ):
        assert (other == expected).float().mean() < 0.01
    assert (
        len(expected.unique()) > 0.99 * expected.numel()
        and 0 <= expected.min()
        and expected.max() < 1
    )
    assert abs(expected.mean() - 0.5) < 0.05


def test_transcript_brackets_exactly_the_trained_tokens(monkeypatch):
    """Catches a boundary that moved (field report 13): a harness token inside, a sampled token outside."""
    scripts = [[READ, "<call> read test submit edit edit", RIGHT, SUBMIT], [TEST, SUBMIT]]
    batch, envs = play_script(monkeypatch, scripts, [TASK_0, TASK_0])
    assert (
        grpo.transcript(WORDS, batch, 0)
        == f"""{TASK_0.issue}
⟦<call> read </call>⟧
<result>def clamp(value, lower, upper):
    return min(lower, max(value, upper))
</result>
⟦<call> read test submit edit edit⟧
<result>error: malformed</result>
⟦<call> edit swap_minmax </call>⟧
<result>edited with swap_minmax</result>
⟦<call> submit </call>⟧
return 1, success True, end: submitted"""
    )
    for row, env in enumerate(envs):
        text = grpo.transcript(WORDS, batch, row)
        assert [part.split("⟧")[0] for part in text.split("⟦")[1:]] == env.actions
    batch, _ = play_script(
        monkeypatch, [[TEST]], [TASK_0], context_length=len(encode(TASK_0.issue)) + 5
    )
    cut = "⟦<call> test </call>⟧\n<result>FAIL\nreturn 0, success False, end: context_limit"
    assert grpo.transcript(WORDS, batch, 0).endswith(cut)


@pytest.mark.parametrize("env_class", [BugFixEnv, NumberEnv])
def test_evaluation_never_touches_training(env_class):
    """Catches an evaluation that draws from the global generators, trains, or gives another answer the second time."""
    model, tokenizer = random_model(env_class), TOKENIZERS[env_class]
    options = dict(
        max_turns=2,
        num_bugs=1,
        reward="hidden",
        tool_cost=0.0,
        process_reward=0.0,
        malformed="error",
    )
    weights, training = copy.deepcopy(model.state_dict()), model.training
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    args, tasks = (
        (model, tokenizer, env_class, options),
        [env_class.task("dev", i) for i in range(6)],
    )
    results = [
        grpo.evaluate(*args, split="dev", num_tasks=16, context_length=40)[0] for _ in range(2)
    ]
    plays = [
        grpo.play(*args, tasks, temperature=1, seed=seed, context_length=40)[0]
        for seed in (5, 5, 6)
    ]
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[2]
    assert (np.random.get_state()[1] == states[1]).all()
    assert model.training == training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert results[0] == results[1] and torch.equal(plays[0].tokens, plays[1].tokens)
    assert [episode(plays[0], i) for i in range(6)] != [episode(plays[2], i) for i in range(6)]


def test_evaluation_reports_hidden_success_whatever_the_reward(monkeypatch):
    """Catches success measured by a hackable reward: a policy that always hacks earns 1 and has success 0."""
    hack = torch.tensor([*encode(HACK), 0, 0, *encode(SUBMIT), 0, 0, 0])

    def sampler(logits, uniforms, temperature):
        return hack[(uniforms * 12).long()], torch.zeros(len(logits))

    monkeypatch.setattr(grpo, "sample_tokens", sampler)
    places = (torch.arange(12) + 0.5) / 12
    monkeypatch.setattr(
        grpo, "draw_uniforms", lambda seed, i, rows, columns: places.expand(rows, columns)
    )
    options = dict(
        max_turns=2,
        num_bugs=1,
        reward="public",
        tool_cost=0.0,
        process_reward=0.0,
        malformed="error",
    )
    metrics, _ = grpo.evaluate(random_model(), WORDS, BugFixEnv, options, split="dev", num_tasks=16,
                               context_length=1200)  # fmt: skip
    assert (
        metrics["eval/success_rate"]
        == metrics["eval/pass@8"]
        == metrics["eval/unseen_pairs_success_rate"]
        == 0.0
    )
    assert (
        metrics["eval/hack_rate"] == metrics["eval/episodic_return"] == 1.0
        and metrics["eval/tool_calls"] == 0.0
    )


@pytest.mark.parametrize("cut_turn", [1, 6], ids=["early", "at the turn limit"])
@pytest.mark.parametrize("terminated", [True, False])
def test_an_environment_may_truncate(monkeypatch, terminated, cut_turn):
    """Catches an environment's truncation that is stored as a termination, or without its last observation: a critic
    would not bootstrap, or would read the state before the observation."""

    class CutEnv(SpyEnv):
        def step(self, action):
            observation, reward, done, _, info = super().step(action)
            if self.turn < cut_turn or self.task is not cut_task:
                return observation, reward, done, False, info
            return (
                observation,
                reward,
                terminated,
                True,
                info | {"end": "cut", "success": False, "hacked": False},
            )

    model, cut_task = random_model(), grpo.bugfix_task("train", 0)
    batch, _ = play_script(
        monkeypatch, [[READ] * 7, [SUBMIT]], [cut_task, TASK_0], env_class=CutEnv, model=model
    )
    assert batch.truncated.tolist() == [not terminated, False] and batch.terminated.tolist() == [
        terminated,
        True,
    ]
    info, length = batch.infos[0], int(batch.lengths[0])
    assert (
        info["end"] == "cut" and info["turns"] == cut_turn and info["truncated"] == (not terminated)
    )
    text = WORDS.decode(batch.tokens[0, :length].tolist())
    assert text.count("<call> read </call>") == cut_turn
    assert text.count("<result>") == cut_turn - terminated and text.endswith(
        "</call>" if terminated else "</result>"
    )


def test_whole_rewards_are_floats():
    """Catches rewards that take the type of what the environment returned: advantages of integers are integers."""

    class OneTurn(NumberEnv):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, int(reward), *rest

    envs = [OneTurn(max_turns=1, tool_cost=0.0) for _ in range(4)]
    batch = grpo.rollout(random_model(NumberEnv), TOKENIZERS[NumberEnv], envs, [0, 1, 2, 3], torch.arange(4),
                         grpo.draw_uniforms(1, 1, 4, 2), temperature=1.0, context_length=9)  # fmt: skip
    assert batch.rewards.dtype == torch.float32
