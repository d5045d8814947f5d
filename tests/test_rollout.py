"""Model, sampling, rollout and evaluation: which ids are stored, which are trained, what each
episode's record says.

Most tests script the policy: the uniforms carry the ids to sample, and a sampler put in the place
of grpo.sample_tokens reads them. Everything else, the indexing of the uniforms included, is the
real rollout.
"""

import random
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import WORDS, env_maker, partial_batch, same, tasks_of, tokenizer_of

import bugfix_env
import grpo
from grpo import BugFixEnv, NumberEnv

torch.set_num_threads(1)  # these models are too small to share

CALLS = ("read", "test", "submit", "edit swap_minmax", "edit hardcode_tests", "read read")
MESSAGES = tuple(f"<call> {call} </call>" for call in CALLS)
READ, TEST, SUBMIT, RIGHT, HACK, _ = MESSAGES
TASK_0 = bugfix_env.TASK_0._replace(issue="clamp(3, 0, 5) gives a wrong result.")
SOLVED = TASK_0._replace(source=TASK_0.fix)
encode, STOP = WORDS.encode, WORDS.ids[BugFixEnv.stop]
CUT, FILLER = (
    "context_limit",
    1,
)  # the id that is sampled where a script is silent; neither padding nor the closing token


def random_model(env_class=BugFixEnv):
    """A TinyAgent whose every matrix matters (at its start the blocks are the identity and
    attention goes untested), and that closes a message, or calls and answers, now and then, so that
    episodes differ in length."""
    torch.manual_seed(0)
    ids = tokenizer_of(env_class).ids
    model = grpo.TinyAgent(len(ids), d_model=16, n_layers=2, n_heads=2)
    model.head.bias = torch.nn.Parameter(torch.zeros(len(ids)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        for word, value in ((" </call>", 5), (" call", 4), (" ans", 4), (" 2", 2), (" 5", 2)):
            if word in ids:
                model.head.bias[ids[word]] = value
    return model


class SpyEnv(BugFixEnv):
    """Keeps what it was told and the time it took. Whole rewards are integers here, as an
    environment may return them."""

    def reset(self, task):
        self.actions, self.seconds = [], 0.0
        return super().reset(task)

    def step(self, action):
        start = time.perf_counter()
        observation, reward, *rest = super().step(action)
        self.actions.append(action)
        self.seconds += time.perf_counter() - start
        return observation, int(reward) if reward == int(reward) else reward, *rest


def roll(envs, tasks, uniforms, model=None, *, temperature=1.0, context_length=1200):
    """rollout() of grpo.py, with a random model unless one is given. Groups are not by position,
    and have to be kept."""
    model, tokenizer = model or random_model(type(envs[0])), tokenizer_of(type(envs[0]))
    group_ids = torch.arange(len(envs)).flip(0) // 2
    options = dict(temperature=temperature, context_length=context_length)
    batch = grpo.rollout(model, tokenizer, envs, tasks, group_ids, uniforms, **options)
    assert torch.equal(batch.group_ids, group_ids)
    return batch


def spell(script, env):
    """The ids of each turn, as many as it may have: the script's messages, texts or ids, filled."""
    text_to_ids = tokenizer_of(type(env)).encode
    rows = [text_to_ids(message) if isinstance(message, str) else message for message in script]
    rows = [*rows, *[()] * env.max_turns][: env.max_turns]
    return [[*row, *[FILLER] * env.turn_tokens][: env.turn_tokens] for row in rows]


def script_policy(monkeypatch, scripts, envs):
    """Makes the sampler read ids from the uniforms. Returns those of the scripts, whose messages
    are texts or lists of ids."""

    def sampler(logits, uniforms, temperature):
        chosen = (uniforms.double() * logits.shape[1]).long()
        logprobs = F.log_softmax(logits / (temperature or 1.0), -1)
        return chosen, logprobs.gather(1, chosen[:, None])[:, 0]

    monkeypatch.setattr(grpo, "sample_tokens", sampler)
    ids = torch.tensor([spell(script, env) for script, env in zip(scripts, envs, strict=True)])
    return (ids.flatten(1) + 0.5) / len(tokenizer_of(type(envs[0])).words)


def play_script(monkeypatch, scripts, tasks, *, make_env=SpyEnv, **options):
    """Rolls out episodes whose messages are scripted. Returns (batch, envs)."""
    envs = [make_env() for _ in scripts]
    return roll(envs, tasks, script_policy(monkeypatch, scripts, envs), **options), envs


def reference(env, task, script, context_length):
    """The grammar in plain Python: the prompt, then each message and its observation. The closing
    token ends a message, and nothing stands between the two. Returns [(id, mask, turn id)], the
    rewards, the anchors, what the environment was told, and what infos say of the episode."""
    rows, rewards = [(i, 0, -1) for i in encode(env.reset(task)[0])], [0.0] * env.max_turns
    info = dict(end="context_limit", success=False, hacked=False, turns=0, tool_calls=0, errors=0)
    info |= dict(pair=task.pair, tools=[])
    anchors = []
    for turn, message in enumerate(spell(script, env)):
        if STOP in message:
            message = message[: message.index(STOP) + 1]
        rows += [(i, 1, turn) for i in message]
        if len(rows) > context_length:
            break
        anchors.append(env.anchor)
        observation, rewards[turn], done, _, said = env.step(WORDS.decode(message))
        info["turns"] += 1
        info["tools"].append(said["tool"])
        info["errors"] += said["error"]
        info["tool_calls"] += said["tool"] in ("read", "test") and not said["error"]
        if done:
            info |= {key: said[key] for key in ("end", "success", "hacked")}
            break
        rows += [(i, 0, turn) for i in encode(observation)]
    return rows[:context_length], rewards, anchors, env.actions, info


# ---- Which ids are stored and trained, and what else is stored of an episode

COSTS = dict(tool_cost=0.25, process_reward=0.5)


@pytest.mark.parametrize("options", [COSTS, dict(max_turns=1), dict(max_turns=3)], ids=str)
def test_random_episodes_equal_the_reference_grammar(monkeypatch, options):
    """Catches mask, turn ids or log-probs of another length than the ids, history that is decoded
    and encoded again, a closing token that is masked, added or taken for the row's end, text after
    a call that stays or is executed, padding guessed from ids (<pad> may be sampled), a context
    cut in the wrong place, executed or called malformed, a lost last reward, rewards that take the
    environment's type, a tool loop without end, seconds of one turn only, a hack called success,
    and edits or errors counted as tool calls (field reports 1, 2, 10, 12, 14 to 16, 22, 32, 70, 71,
    97). Messages are valid, wrong, empty, unclosed and overlong, the context ends anywhere."""
    rng, model = np.random.default_rng(0), random_model()

    def message():
        noise = rng.integers(len(WORDS.words), size=6).tolist()
        call, closed = encode(MESSAGES[rng.integers(6)]), [*noise[: rng.integers(6)], STOP]
        return [noise, [0] * 6, closed, [*call, *noise], call][rng.integers(5)]

    scripts = [[RIGHT, SUBMIT], [READ, SUBMIT], [SUBMIT], [HACK, SUBMIT]]
    scripts += [[message() for _ in range(6)] for _ in range(12)]
    tasks = [TASK_0, SOLVED, SOLVED, TASK_0, *tasks_of(BugFixEnv, "train", 12)]
    play = partial(play_script, monkeypatch, make_env=partial(SpyEnv, **options), model=model)
    for context_length in (*range(1, 60), 120, 1200):
        batch, envs = play(scripts, tasks, context_length=context_length)
        assert batch.tokens.shape[1] == batch.lengths.max() <= context_length
        assert batch.tokens.dtype == torch.int64 and batch.rewards.dtype == torch.float32
        stored = torch.stack([batch.tokens, batch.loss_mask.long(), batch.turn_ids], -1).tolist()
        for row, env in enumerate(envs):
            told, seconds = env.actions, env.seconds
            expected = reference(env, tasks[row], scripts[row], context_length)
            n, info = batch.lengths[row], batch.infos[row]
            assert info.pop("env_seconds") >= seconds
            rewards, ids = batch.rewards[row].tolist(), [tuple(ids) for ids in stored[row]]
            assert (ids[:n], rewards, batch.anchors[row], told, info) == expected
            assert ids[n:] == [(0, 0, -1)] * len(ids[n:])
            assert batch.truncated[row] == (not batch.terminated[row]) == (info["end"] == CUT)
            assert torch.equal(batch.logprobs[row] < 0, batch.loss_mask[row] > 0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_raises_naming_the_episode(monkeypatch, reward):
    """Catches a NaN or None reward that turns into 0 or into the whole group's NaN (report 67)."""

    class BadEnv(SpyEnv):
        def step(self, action):
            observation, paid, *rest = super().step(action)
            return observation, reward if self.goal is SOLVED else paid, *rest

    tasks = [TASK_0, SOLVED, TASK_0]
    with pytest.raises(ValueError, match=f"episode 1 .*clamp:swap_minmax.*turn 0.*is {reward}"):
        play_script(monkeypatch, [[READ, SUBMIT]] * 3, tasks, make_env=BadEnv)


def test_hidden_number_layout(monkeypatch):
    """Catches any other layout, mask, turn ids or return than the documented example."""
    scripts = [[" call 3", " call 5", " ans 4"], [" ans 4"]]
    batch, _ = play_script(monkeypatch, scripts, [4, 4], make_env=NumberEnv)
    text = tokenizer_of(NumberEnv).decode(batch.tokens[0].tolist())
    assert text == "<bos> ? call 3 <tool> higher call 5 <tool> lower ans 4"
    assert batch.loss_mask[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert batch.turn_ids[0].tolist() == [-1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert batch.rewards[0].tolist() == pytest.approx([-0.05, -0.05, 1, 0, 0])
    assert batch.anchors == [[(0, 7), (4, 7), (4, 4)], [(0, 7)]]
    assert batch.lengths.tolist() == [12, 4] and batch.terminated.all()
    keys = ("end", "success", "turns", "tool_calls", "errors", "pair")
    infos = [[info[key] for key in keys] for info in batch.infos]
    assert infos == [["submitted", True, 3, 2, 0, "4"], ["submitted", True, 1, 0, 0, "4"]]


@pytest.mark.parametrize("cut_turn", [1, 6], ids=["early", "at the turn limit"])
@pytest.mark.parametrize("terminated", [True, False])
def test_an_environment_may_truncate(monkeypatch, terminated, cut_turn):
    """Catches an environment's truncation that is stored as a termination, or without its last
    observation: a critic would not bootstrap, or would read the state before the observation."""

    class CutEnv(SpyEnv):
        def step(self, action):
            observation, reward, done, _, info = super().step(action)
            if self.turn < cut_turn or self.goal is TASK_0:
                return observation, reward, done, False, info
            info |= {"end": "cut", "success": False, "hacked": False}
            return observation, reward, terminated, True, info

    scripts, tasks = [[READ] * 7, [SUBMIT]], [*tasks_of(BugFixEnv, "train", 1), TASK_0]
    batch, _ = play_script(monkeypatch, scripts, tasks, make_env=CutEnv)
    assert batch.truncated.tolist() == [not terminated, False]
    assert batch.terminated.tolist() == [terminated, True]
    info, text = batch.infos[0], WORDS.decode(batch.tokens[0, : batch.lengths[0]].tolist())
    assert (info["end"], info["turns"]) == ("cut", cut_turn)
    assert text.count(READ) == cut_turn and text.count("<result>") == cut_turn - terminated
    assert text.endswith("</call>" if terminated else "</result>")


def test_transcript_brackets_exactly_the_trained_tokens(monkeypatch):
    """Catches a boundary that moved (field report 13): a harness token inside, a sampled token
    outside."""
    script = [READ, "<call> read test submit edit edit", RIGHT, SUBMIT]
    batch, _ = play_script(monkeypatch, [script], [TASK_0])
    expected = f"""{TASK_0.issue}
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
    assert grpo.transcript(WORDS, batch, 0) == expected
    cut = len(encode(TASK_0.issue)) + 5
    batch, _ = play_script(monkeypatch, [[TEST]], [TASK_0], context_length=cut)
    end = "⟦<call> test </call>⟧\n<result>FAIL\nreturn 0, success False, end: context_limit"
    assert grpo.transcript(WORDS, batch, 0).endswith(end)


# ---- Scores, caches, batches and noise


@pytest.mark.parametrize("env_class", [BugFixEnv, NumberEnv])
@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_equals_the_rollouts_logprobs(monkeypatch, temperature, scripted, env_class):
    """Catches a temperature in one place only, shifted rows, attention to what comes later, other
    positions or slots in cache and forward, cache rows mixed up when finished episodes leave or
    beyond the first part of the prefill, padding that shifts positions, is attended to, or shares a
    slot with a real token (field reports 6, 17, 18, 20, 21): 80 episodes of all lengths, cut ones
    too, with observations scored or not."""
    tasks, model = tasks_of(env_class, "train", 80), random_model(env_class)
    script = [READ, TEST, RIGHT, "<call> read", TEST, SUBMIT]
    script = script if env_class is BugFixEnv else [" call 3", " call 6", " call 0", " ans 4"]
    scripts = [script[i % len(script) :] for i in range(80)]
    envs = [env_class(malformed="error") for _ in tasks]
    uniforms = grpo.draw_uniforms(2, 1, 80, envs[0].max_turns * env_class.turn_tokens)
    uniforms = script_policy(monkeypatch, scripts, envs) if scripted else uniforms
    for context_length in (1200, 60 if env_class is BugFixEnv else 9):
        options = dict(temperature=temperature, context_length=context_length)
        batch = roll(envs, tasks, uniforms, model, **options)
        assert len(set(batch.lengths.tolist())) > 1
        for mask in (batch.loss_mask, (batch.turn_ids >= 0).float()):
            with torch.no_grad():
                logprobs, entropy, _ = grpo.score(model, batch.tokens, mask, temperature)
            assert (logprobs - batch.logprobs)[batch.loss_mask > 0].abs().max() < 1e-4
            assert not logprobs[mask == 0].any() and not entropy[mask == 0].any()
            assert (logprobs[mask > 0] < 0).all() and (entropy[mask > 0] > 0).all()
        other, _, _ = grpo.score(model, batch.tokens, batch.loss_mask, temperature * 0.8)
        assert (other - batch.logprobs)[batch.loss_mask > 0].abs().max() > 0.1, "the model is blind"


def test_sampler_draws_at_the_temperature():
    """Catches a sampler that ignores the temperature, in what it draws or in the log-probs."""
    logits, uniforms = (
        torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]),
        (torch.arange(20000) + 0.5) / 20000,
    )
    for temperature in (1.0, 0.7, 2.0):
        ids, logprobs = grpo.sample_tokens(logits.expand(20000, -1), uniforms, temperature)
        expected = F.softmax(logits[0] / temperature, -1)
        assert torch.allclose(torch.bincount(ids, minlength=4) / 20000, expected, atol=2e-4)
        assert torch.allclose(logprobs.exp(), expected[ids], atol=1e-6)


def test_uniforms_are_keyed_by_seed_iteration_row_and_position():
    """Catches streamed noise: it must depend on its key, not on a generator's past or on how many
    rows are drawn."""
    expected, state = grpo.draw_uniforms(3, 7, 32, 36), torch.get_rng_state()
    torch.rand(5), np.random.rand(3)
    assert torch.equal(grpo.draw_uniforms(3, 7, 32, 36), expected)
    torch.set_rng_state(state)
    assert torch.equal(grpo.draw_uniforms(3, 7, 20, 36), expected[:20])
    assert torch.equal(torch.get_rng_state(), state)
    for key in ((4, 7), (3, 8), (7, 3)):
        assert (grpo.draw_uniforms(*key, 32, 36) == expected).float().mean() < 0.01
    assert len(expected.unique()) > 0.99 * expected.numel() and abs(expected.mean() - 0.5) < 0.05
    assert 0 <= expected.min() and expected.max() < 1


# ---- Evaluation


def evaluate(model, make_env, num_tasks, context_length=400):
    """evaluate() of grpo.py on dev tasks."""
    options = dict(split="dev", num_tasks=num_tasks, context_length=context_length)
    return grpo.evaluate(model, tokenizer_of(make_env[0].func), *make_env, **options)


@pytest.mark.parametrize("env_class", [BugFixEnv, NumberEnv])
def test_evaluation_never_touches_training(env_class):
    """Catches an evaluation that draws from the global generators, trains, or gives another answer
    the second time."""
    model, make_env = random_model(env_class), env_maker(env_class, max_turns=2)
    args = (model, tokenizer_of(env_class), *make_env, tasks_of(env_class, "dev", 6))

    def state():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        generators = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        return weights, model.training, generators, [p.grad for p in model.parameters()]

    before = state()
    a, b = (evaluate(model, make_env, 16, 40)[0] for _ in range(2))
    plays = [grpo.play(*args, temperature=1, seed=seed, context_length=40)[0] for seed in (5, 5, 6)]
    assert same(before, state()) and a == b
    a, b, c = (batch.tokens.tolist() for batch in plays)
    assert a == b != c


def test_evaluation_reports_hidden_success_whatever_the_reward(monkeypatch):
    """Catches success measured by a hackable reward: a policy that always hacks earns 1 and has
    success 0."""
    options = dict(max_turns=2, reward="public")
    uniforms = script_policy(monkeypatch, [[HACK, SUBMIT]], [BugFixEnv(**options)])
    monkeypatch.setattr(grpo, "draw_uniforms", lambda *key: uniforms.expand(key[-2], -1))
    metrics, _ = evaluate(random_model(), env_maker(**options), 16, 1200)
    success = ("success_rate", "pass@8", "unseen_pairs_success_rate")
    assert [metrics[f"eval/{key}"] for key in (*success, "tool_calls")] == [0, 0, 0, 0]
    assert metrics["eval/hack_rate"] == metrics["eval/episodic_return"] == 1


def test_evaluation_is_greedy():
    """Catches an evaluation that samples: every token it wrote is the likeliest."""
    model = random_model()
    for batch in evaluate(model, env_maker(max_turns=3), 16)[1]:
        with torch.no_grad():
            best = model(batch.tokens).argmax(-1)
        where = batch.loss_mask[:, 1:] > 0
        assert (best[:, :-1][where] == batch.tokens[:, 1:][where]).float().mean() > 0.99


INFO = dict(success=False, hacked=False, turns=1, tool_calls=0, errors=0, truncated=False)


def record(infos, rewards, tokens):
    """A Batch of which episode_metrics can be computed."""
    mask = torch.ones(len(infos), tokens)
    truncated = torch.tensor([info["truncated"] for info in infos])
    rewards = torch.tensor(rewards)
    return partial_batch(infos=infos, rewards=rewards, loss_mask=mask, truncated=truncated)


def planned(monkeypatch, success):
    """Puts success(task, how often the call had it before, temperature) in the place of play().
    Returns the list of what it is asked for, (tasks, temperature)."""
    calls = []

    def play(*args, temperature, **options):
        seen, infos = Counter(), []
        for task in args[-1]:
            infos.append(INFO | dict(success=success(task, seen[task], temperature)))
            seen[task] += 1
        calls.append((args[-1], temperature))
        return [record(infos, [0.0], 1)]

    monkeypatch.setattr(grpo, "play", play)
    return calls


def test_pass_at_8_and_the_tasks_of_an_evaluation(monkeypatch):
    """Catches pass@8 over the wrong axis or over different tasks, all for any, greedy samples, and
    unseen pairs of another split."""
    tasks = tasks_of(BugFixEnv, "dev", 32)
    lucky = {tasks[0], tasks[2], tasks[3]}
    solves = lambda task, n, temperature: task in lucky and n == 5 * temperature  # noqa: E731
    calls = planned(monkeypatch, solves)
    metrics, _ = evaluate(None, env_maker(), 32)
    assert metrics["eval/success_rate"] == 3 / 32 and metrics["eval/pass@8"] == 3 / 4
    assert metrics["eval/unseen_pairs_success_rate"] == 0
    repeated = [task for task in tasks[:4] for _ in range(8)]
    assert calls == [(tasks, 0), (repeated, 1), (tasks_of(BugFixEnv, "unseen", 8), 0)]


def test_describe_start(monkeypatch):
    """Catches counts per task over the wrong axis. Of 64 tasks 16 are always solved, 8 never, 40 at
    times."""
    tasks = tasks_of(BugFixEnv, "train", 64)

    def success(task, n, temperature):
        i = tasks.index(task)
        return i < 16 or (i >= 24 and n % 2 == 0)

    planned(monkeypatch, success)
    metrics = grpo.describe_start(None, WORDS, *env_maker(), group_size=4, context_length=400)
    shares = [metrics[f"start/tasks_{how}_solved"] for how in ("always", "never", "sometimes")]
    assert shares == [16 / 64, 8 / 64, 40 / 64] and metrics["start/success_rate"] == 36 / 64
    informative = 40 / 64 * (1 - 2 / 70)  # 1 - 2 C(4, 4) / C(8, 4)
    assert metrics["start/informative_groups"] == pytest.approx(informative)


def test_episode_metrics_by_hand():
    """Catches truncated episodes left out of a mean, and errors per episode instead of per turn."""
    infos = [
        INFO | dict(success=True, turns=2, tool_calls=1),
        INFO | dict(hacked=True, turns=3, tool_calls=2, errors=1),
        INFO | dict(errors=1, truncated=True),
        INFO | dict(turns=6, tool_calls=5, errors=1),
    ]
    parts = record(infos[:3], [[1.0], [0.25], [0.0]], 4), record(infos[3:], [[0.5]], 8)
    expected = dict(success_rate=1 / 4, hack_rate=1 / 4, truncation_rate=1 / 4, tool_calls=2)
    expected |= dict(invalid_action_rate=3 / 12, episodic_return=1.75 / 4)
    expected |= dict(episodic_length=3, tokens_per_episode=5)
    assert grpo.episode_metrics(parts) == pytest.approx(expected)


def test_play_plays_every_task():
    """Catches a last, smaller batch that is dropped."""
    tasks = tasks_of(NumberEnv, "dev", 300)
    args = (random_model(NumberEnv), tokenizer_of(NumberEnv), *env_maker(NumberEnv), tasks)
    batches = grpo.play(*args, temperature=1, seed=0, context_length=20)
    assert [len(batch.infos) for batch in batches] == [256, 44]
    played = [info["pair"] for batch in batches for info in batch.infos]
    assert played == [str(task) for task in tasks]
