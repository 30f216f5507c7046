"""text_env_pairwise_grpo.py: environment, pairs in loops, identities, offline, runs, learning."""

import argparse
import copy
import itertools
import json
import math
import shutil
import signal
import statistics
import threading
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from scipy import stats

import text_env_pairwise_grpo as te
from conftest import (
    bad_files,
    check_full_disk,
    check_kill_while_saving,
    check_refused,
    check_resume,
    check_second_interrupt,
    check_unwritable,
    close,
    events_of,
    golden,
    interrupt_at,
    interrupt_first_evaluation,
    metrics,
    same,
    state,
)

PAIRWISE = ["pairwise_logistic", "pairwise_linear"]
ESTIMATORS = [*PAIRWISE, "group_norm"]
LONG = "thequickbrownfoxjumpsoverthelazy"
SMALL = ["--language", "custom", "--charset", "abc", "--target", "cab"]


def make_args(*flags: str) -> argparse.Namespace:
    return te.parse_args(["--threads", "1", *flags, "--quiet"])


def make_trainer(*flags: str) -> te.Trainer:
    return te.Trainer(make_args(*flags))


def weights(trainer: te.Trainer, part="actor") -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.parts[part].parameters()])


def sgd(trainer: te.Trainer, rate=0.1) -> list:
    """Plain gradient steps in place of Adam's. Returns a list that grows with every step."""
    taken: list = []
    parts = [trainer.parts[name] for name in ("actor", "critic") if name in trainer.parts]
    trainer.optimizer = torch.optim.SGD([p for x in parts for p in x.parameters()], lr=rate)
    trainer.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    return taken


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def pairs(size: int) -> list[tuple[int, int]]:
    """All ordered pairs i != j."""
    return [(i, j) for i in range(size) for j in range(size) if i != j]


# ---- 1  environment ------------------------------------------------------------------------------


def test_charsets():
    english, code, chinese = (te.CHARSETS[name] for name in ("english", "code", "chinese"))
    assert [len(alphabet) for _, alphabet in (english, code, chinese)] == [26, 10, 3755 + 4]
    assert (english[0], code[0], chinese[0]) == ("hello", "12345", "你好世界")
    for target, alphabet in te.CHARSETS.values():
        assert len(set(alphabet)) == len(alphabet) and set(target) <= set(alphabet)
    assert english[1] == "".join(map(chr, range(97, 123))) and code[1] == "0123456789"
    level_1 = chinese[1][:3755]
    assert level_1[0] == "啊" and level_1[-1] == "座" and chinese[1][3755:] == "，。！？"
    assert all("\u4e00" <= c <= "\u9fff" for c in level_1)


@pytest.mark.parametrize("observation", ["onehot", "scalar"])
@pytest.mark.parametrize("language", te.CHARSETS)
def test_gymnasiums_checker(language, observation):
    """No warning but that no spec is registered, so no other render mode can be tried."""
    env = te.MultilingualTextEnv(*te.CHARSETS[language], observation, render_mode="ansi")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_env(env)
    assert all("alternative render modes" in str(w.message) for w in told)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_environment_character_by_character(scale):
    env = te.MultilingualTextEnv("cab", "abcd", reward_scale=scale, render_mode="ansi")
    observation, info = env.reset(seed=1)
    assert observation.tolist() == [1, 0, 0] and info == {"generated": ""}
    assert env.render() == "...  (target cab)"
    told = [env.step(action) for action in (2, 3, np.int64(1))]
    assert [t[0].tolist() for t in told] == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert all(t[0].dtype == np.float32 and t[0] in env.observation_space for t in told)
    assert [t[1] for t in told] == [scale, -0.1 * scale, scale]
    assert [t[2] for t in told] == [False, False, True] and not any(t[3] for t in told)
    assert [t[4]["generated"] for t in told] == ["c", "cd", "cdb"]
    assert env.render() == "cdb  (target cab)"
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)
    assert env.reset()[1] == {"generated": ""} and env.render() == "...  (target cab)"
    env.step(0)
    assert env.render() == "a..  (target cab)"
    assert te.MultilingualTextEnv("cab").render() is None


def test_observations():
    onehot, scalar = (te.position_table(4, name) for name in ("onehot", "scalar"))
    assert onehot.tolist() == [[float(i == t) for i in range(4)] for t in range(5)]
    assert scalar.tolist() == [[0.0], [0.25], [0.5], [0.75], [1.0]]
    assert onehot.dtype == scalar.dtype == np.float32
    env = te.MultilingualTextEnv("cab", "abc", "scalar")
    first, _ = env.reset()
    first[:] = 7  # what is handed out is a copy
    env.step(0)[0][:] = 7
    assert env.reset()[0].tolist() == [0] and env.step(0)[0].tolist() == pytest.approx([1 / 3])


@pytest.mark.parametrize("action", [-1, 26, 1.5, "a", None])
def test_invalid_actions(action):
    env = te.MultilingualTextEnv()
    env.reset()
    with pytest.raises(ValueError, match=r"not one of 0\.\.25"):
        env.step(action)
    assert env.generated == ""


def test_seeding():
    """The environment is deterministic, whatever the seed; its generator is gymnasium's."""
    env, drawn = te.MultilingualTextEnv(), []
    for seed in (3, 3, 4):
        assert env.reset(seed=seed)[0].tolist() == [1, 0, 0, 0, 0]
        drawn.append(env.np_random.integers(1 << 30))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_target_outside_the_alphabet_names_the_characters():
    """Erratum 20."""
    with pytest.raises(ValueError, match=r"'你!' of 'a你!b!' is not in the alphabet"):
        te.MultilingualTextEnv("a你!b!")
    with pytest.raises(ValueError, match="empty"):
        te.MultilingualTextEnv("")
    assert te.target_problem("abba", "ab") == ""


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(
    "target,charset", [("hello", te.CHARSETS["english"][1]), ("b", "ab"), (LONG[:12], LONG[:26])]
)
@pytest.mark.parametrize("observation", ["onehot", "scalar"])
def test_the_batch_is_the_environment(observation, target, charset, scale):
    """sample_batch and the network's rows against one environment, text by text."""
    charset = "".join(dict.fromkeys(charset))
    flags = ["--language", "custom", "--charset", charset, "--target", target]
    trainer = make_trainer(*flags, "--observation", observation, "--reward_scale", str(scale))
    with torch.no_grad():  # so that right ones are not rare
        trainer.actor[-1].bias[[charset.index(c) for c in target]] += 2
    log_probs = trainer.log_probs()
    batch = te.sample_batch(log_probs, trainer.target, 40, scale, trainer.generator)
    assert batch.actions.shape == batch.rewards.shape == batch.logp_old.shape == (40, len(target))
    assert batch.rewards.dtype == torch.float32
    env = te.MultilingualTextEnv(target, charset, observation, scale)
    for row, actions in enumerate(batch.actions.tolist()):
        seen, info = env.reset()
        for t, action in enumerate(actions):
            assert (trainer.positions[t].numpy() == seen).all()
            logits = trainer.actor(torch.tensor(seen)[None])[0].log_softmax(dim=0)
            assert batch.logp_old[row, t].item() == pytest.approx(logits[action].item(), abs=1e-5)
            seen, reward, done, _, info = env.step(action)
            assert batch.rewards[row, t].item() == pytest.approx(reward, rel=1e-6)
        assert done and info["generated"] == te.decode(batch.actions[row], charset)
    if len(target) < 6:
        assert len(set(batch.rewards.flatten().tolist())) == 2


def test_characters_are_the_policys():
    log_probs = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, -3.0]]).log_softmax(dim=1)
    generator = torch.Generator().manual_seed(0)
    target = torch.tensor([2, 0])
    batch = te.sample_batch(log_probs, target, 50_000, 1.0, generator)
    for t in range(2):
        found = batch.actions[:, t].bincount(minlength=3).numpy()
        p = log_probs[t].double().softmax(dim=0).numpy()
        assert stats.chisquare(found, p * 50_000).pvalue > 1e-4
    close(batch.logp_old, torch.stack([log_probs[t][batch.actions[:, t]] for t in (0, 1)], dim=1))
    joint = (batch.actions[:, 0] * 3 + batch.actions[:, 1]).bincount(minlength=9).view(3, 3)
    assert stats.chi2_contingency(joint.numpy()).pvalue > 1e-4  # positions are independent
    again = te.sample_batch(log_probs, target, 50_000, 1.0, torch.Generator().manual_seed(0))
    assert torch.equal(batch.actions, again.actions)


# ---- 2  the maths --------------------------------------------------------------------------------


def random_group(size: int, groups=3, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    scores = torch.randn(groups, size, dtype=torch.float64)
    return torch.randn_like(scores).requires_grad_(), scores


def column(temperature: float, groups=3) -> torch.Tensor:
    return torch.full((groups, 1), temperature, dtype=torch.float64)


def test_pair_differences_in_loops():
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    ours = te.pair_differences(x)
    assert ours.shape == (2, 3, 20)
    for a in range(2):
        for b in range(3):
            group = x[a, b].tolist()
            assert ours[a, b].tolist() == [group[i] - group[j] for i, j in pairs(5)]


@pytest.mark.parametrize("temperature", [0.3, 2.0])
@pytest.mark.parametrize("size", [2, 5])
def test_pairwise_forms_in_loops(size, temperature):
    log_weights, scores = random_group(size)
    scaling = column(temperature) * torch.tensor([[1.0], [2.0], [3.0]])  # a T for each group
    linear = te.pairwise_linear(log_weights, scores, scaling)
    logistic = te.pairwise_logistic(log_weights, scores, scaling)
    assert linear.shape == logistic.shape == (3,)
    for b in range(3):
        w, score, unit = log_weights[b].tolist(), scores[b].tolist(), temperature * (b + 1)
        one = two = 0.0
        for i, j in pairs(size):
            x, dw = (score[i] - score[j]) / unit, w[i] - w[j]
            one += -log_sigmoid(x) * dw
            p = sigmoid(x)  # the wanted probability that i beats j
            two += -p * log_sigmoid(dw) - (1 - p) * log_sigmoid(-dw)
        assert linear[b].item() == pytest.approx(one / len(pairs(size)), abs=1e-12)
        assert logistic[b].item() == pytest.approx(two / len(pairs(size)), abs=1e-12)
    with pytest.raises(AssertionError):
        te.pairwise_linear(log_weights, scores[:1], scaling)  # would broadcast
    with pytest.raises(AssertionError):
        te.pairwise_logistic(log_weights, scores[:1], scaling)


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("temperature", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_printed_form_is_reinforce(size, temperature, how):
    """Erratum 16: the formula as printed, pairs without a sigmoid, and REINFORCE with the others'
    or the group's mean as baseline, over T. Values and gradients; any w, then the sampling policy.
    """
    torch.manual_seed(size)
    groups, length = 3, 6
    shape = groups, size, length
    anywhere = 0.3 * torch.randn(shape, dtype=torch.float64)
    scores = torch.randn(groups, size, dtype=torch.float64)
    for log_ratio in (anywhere, torch.zeros_like(anywhere)):
        log_ratio.requires_grad_()
        log_weights = te.trajectory_log_weights(log_ratio, how)
        ours = te.pairwise_linear(log_weights, scores, column(temperature))

        pairs_only = torch.zeros(groups, dtype=torch.float64)
        for i in range(size):
            for j in range(i + 1, size):
                dw = log_weights[:, i] - log_weights[:, j]
                pairs_only -= (scores[:, i] - scores[:, j]) / temperature * dw
        pairs_only = pairs_only / (size * (size - 1))

        others = (scores.sum(dim=1, keepdim=True) - scores) / (size - 1)
        leave_one_out = -((scores - others) / temperature * log_weights).mean(dim=1)
        mean = scores.mean(dim=1, keepdim=True)
        group = -((scores - mean) / temperature * log_weights).sum(dim=1) / (size - 1)

        gradients = []
        for form in (ours, pairs_only, leave_one_out, group):
            close(form, ours, 1e-10)
            gradients += torch.autograd.grad(form.sum(), log_ratio, retain_graph=True)
            close(gradients[-1], gradients[0], 1e-10)
        assert gradients[0].abs().max() > 1e-3
        if not log_ratio.any():  # log pi itself: each step's, or their mean
            share = 1 / length if how == "mean" else 1.0
            reinforce = -(scores - others)[..., None] / temperature * share / size
            close(gradients[0], reinforce.expand(shape), 1e-10)


@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_at_the_sampling_policy_the_logistic_form_is_bounded(temperature):
    _, scores = random_group(6)
    slopes = {}
    for form in (te.pairwise_linear, te.pairwise_logistic):
        zero = torch.zeros_like(scores, requires_grad=True)
        loss = form(zero, scores, column(temperature)).sum()
        (slopes[form],) = torch.autograd.grad(loss, zero)
    for b, group in enumerate(scores.tolist()):
        for i in range(6):
            x = [(group[i] - group[j]) / temperature for j in range(6) if j != i]
            slope = -2 * sum(sigmoid(d) - 0.5 for d in x) / 30
            assert slopes[te.pairwise_logistic][b, i].item() == pytest.approx(slope, abs=1e-12)
            assert slopes[te.pairwise_linear][b, i].item() == pytest.approx(-sum(x) / 30)
    assert slopes[te.pairwise_logistic].abs().max() <= 1 / 6
    assert slopes[te.pairwise_linear].abs().max() > (10 if temperature < 1 else 1 / 6)


def test_where_the_logistic_form_stops():
    """At w_i - w_j = (R_i - R_j) / T, and only there; the linear one never does."""
    _, scores = random_group(5)
    at = (scores / 0.7 + 3.0).requires_grad_()  # any constant
    off = (at.detach() * 1.2).requires_grad_()
    for form, w, stops in (
        (te.pairwise_logistic, at, True),
        (te.pairwise_logistic, off, False),
        (te.pairwise_linear, at, False),
    ):
        (slope,) = torch.autograd.grad(form(w, scores, column(0.7)).sum(), w)
        assert (slope.abs().max() < 1e-12) == stops
    best = te.pairwise_logistic(at, scores, column(0.7))
    for _ in range(20):  # a minimum
        assert (te.pairwise_logistic(at + torch.randn_like(at), scores, column(0.7)) > best).all()


def batch_of(rewards: torch.Tensor) -> te.Batch:
    return te.Batch(torch.zeros_like(rewards).long(), torch.zeros_like(rewards), rewards)


def slope_at_pi_old(rewards: torch.Tensor, *flags: str) -> torch.Tensor:
    """Gradient of the loss with respect to log pi, before any step, from rewards (B, K, L)."""
    args = make_args(*flags)
    log_ratio = torch.zeros_like(rewards, requires_grad=True)
    loss = te.policy_loss(args, log_ratio, *te.prepare_inputs(args, batch_of(rewards)))
    return torch.autograd.grad(loss, log_ratio)[0]


@pytest.mark.parametrize("supervision", ["outcome", "process"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_scores_pull_nowhere(estimator, supervision):
    rewards = torch.full((2, 4, 3), 0.7)
    rewards[1, 2, 1] = 1.0
    pairs_only = [["--normalize_returns", "--temperature", "0.5"], ["--temperature", "0.01"]]
    for more in [[], *(pairs_only if estimator in PAIRWISE else [])]:
        flags = ["--adv_estimator", estimator, "--supervision", supervision, *more]
        slope = slope_at_pi_old(rewards, *flags)
        assert torch.equal(slope[0], torch.zeros(4, 3)) and slope[1].any()


@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_rewards_ten_times_as_large(supervision):
    """Erratum 17: at a fixed T the linear form pulls ten times as much; T of the group does not."""
    torch.manual_seed(1)
    rewards = torch.rand(3, 6, 4, dtype=torch.float64)
    slope = lambda scale, *flags: slope_at_pi_old(  # noqa: E731
        rewards * scale, "--supervision", supervision, *flags
    )
    fixed = ["--temperature", "0.5", "--adv_estimator"]
    close(slope(10, *fixed, "pairwise_linear"), 10 * slope(1, *fixed, "pairwise_linear"))
    one, ten = (slope(x, *fixed, "pairwise_logistic") for x in (1, 10))
    assert (ten - one).norm() > 0.2 * one.norm() and ten.abs().max() <= 1 / 6 / 4 / 3
    for estimator in ESTIMATORS:
        one, ten = (slope(x, "--adv_estimator", estimator) for x in (1, 10))
        close(ten, one, 1e-3)
        assert not torch.equal(ten, one) and one.abs().max() > 1e-3
        if estimator != "group_norm":
            one, ten = (slope(x, *fixed, estimator, "--normalize_returns") for x in (1, 10))
            close(ten, one, 1e-3)


@pytest.mark.parametrize("estimator", PAIRWISE)
def test_a_constant_on_all_scores_changes_nothing(estimator):
    """Only differences count: nothing is gained by subtracting the returns' mean."""
    log_weights, scores = random_group(6)
    form = getattr(te, estimator)
    close(form(log_weights, scores, column(0.5)), form(log_weights, scores - 7.0, column(0.5)))
    centred = scores - scores.mean()
    close(form(log_weights, scores, column(0.5)), form(log_weights, centred, column(0.5)))


@pytest.mark.parametrize("case", golden("grpo")["advantages"])
def test_grpo_advantages_golden(case):
    size = case["num_generations"]
    rewards = torch.tensor(case["rewards_per_func"])[:, 0].view(-1, size)
    ours = te.compute_grpo(rewards, case["scale_rewards"]).flatten()
    close(ours, torch.tensor(case["advantages"]), 2e-6)
    if case["scale_rewards"] == "group":
        flat = te.flat_groups(rewards).repeat_interleave(size)
        assert flat.tolist() == case["is_std_zero"]
        assert torch.equal(te.compute_grpo(rewards).flatten(), ours)  # the default


def test_flat_is_exact():
    """Equal scores, whose mean and std are not exact in float32, give 0; a hair's difference not.

    Erratum 10."""
    scores = torch.full((2, 7), 0.7)
    scores[1, 3] += 1e-3
    assert te.flat_groups(scores).tolist() == [True, False]
    for scale in ("group", "batch", "none"):
        advantages = te.compute_grpo(scores, scale)
        assert torch.equal(advantages[0], torch.zeros(7)) and advantages[1].all()
    rewards = torch.full((2, 7, 9), 0.7)
    rewards[1, 3, 5] += 1e-3
    advantages = te.compute_process(rewards)
    assert torch.equal(advantages[0], torch.zeros(7, 9)) and advantages[1].all()


@pytest.mark.parametrize("case", golden("ppo_clip")["cases"])
def test_clip_golden(case):
    """All combinations of where the ratio lies and the sign of A: loss, gradient."""
    logp = torch.tensor([case["new_logprob"]], dtype=torch.float64, requires_grad=True)
    advantage = torch.full_like(logp, case["advantage"]).detach()
    ratio = (logp - case["old_logprob"]).exp()
    loss = -te.clipped_surrogate(ratio, advantage, case["clip_coef"], case["clip_coef"]).sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-10)
    assert logp.grad.item() == pytest.approx(case["dloss_dnewlogprob"], abs=1e-10)


def loop_process(group: list[list[float]]) -> list[list[float]]:
    """DeepSeekMath 4.1.3 for the rewards (K, L) of one group."""
    everything = [r for text in group for r in text]
    if len(set(everything)) == 1:
        return [[0.0] * len(text) for text in group]
    mean, std = statistics.mean(everything), statistics.stdev(everything)
    scaled = [[(r - mean) / (std + 1e-4) for r in text] for text in group]
    return [[sum(text[t:]) for t in range(len(text))] for text in scaled]


def test_process_in_loops():
    rewards = torch.rand(3, 4, 5, dtype=torch.float64)
    rewards[1] = 0.7
    expected = double([loop_process(group) for group in rewards.tolist()])
    close(te.compute_process(rewards), expected, 1e-9)


def test_rewards_to_go_in_loops():
    rewards = torch.randn(2, 3, 5, dtype=torch.float64)
    rows = rewards.flatten(0, 1).tolist()
    expected = [[sum(row[t:]) for t in range(5)] for row in rows]
    close(te.rewards_to_go(rewards).flatten(0, 1), double(expected))


def test_trajectory_log_weights_in_loops():
    log_ratio = torch.randn(2, 3, 5, dtype=torch.float64)
    one, two = (te.trajectory_log_weights(log_ratio, how) for how in ("sum", "mean"))
    for b in range(2):
        for k in range(3):
            ratios = [math.exp(x) for x in log_ratio[b, k].tolist()]
            assert one[b, k].item() == pytest.approx(math.log(math.prod(ratios)), abs=1e-12)
            assert two[b, k].item() == pytest.approx(math.log(statistics.mean(ratios)), abs=1e-12)
    told = torch.tensor([[[0.5, -0.5, 0.3, -0.3, 0.0]]], dtype=torch.float64)
    assert te.trajectory_log_weights(told, "sum").exp().item() == pytest.approx(1.0)
    assert te.trajectory_log_weights(told, "mean").exp().item() == pytest.approx(1.069, abs=5e-4)
    far = torch.tensor([[[200.0, 0.0]]])  # exp of it is infinite in float32
    assert te.trajectory_log_weights(far, "mean").item() == pytest.approx(200 - math.log(2))


def test_kl_golden():
    raw = golden("kl_estimators")["raw"]
    log_ratio = torch.tensor(raw["log_ratio"], dtype=torch.float64)
    k3 = te.kl_k3(torch.zeros_like(log_ratio), log_ratio)
    close(k3, torch.tensor(raw["k3"], dtype=torch.float64))
    assert (k3 >= 0).all()
    for case in golden("kl_estimators")["distributions"]:
        q, p = (torch.tensor(case[k], dtype=torch.float64) for k in ("logq", "logp"))
        mean = (q.exp() * te.kl_k3(q, p)).sum().item()  # sampled from q, so KL(q || p)
        assert mean == pytest.approx(case["exact_KL_q_p"], abs=1e-12)


def test_entropy_and_value_loss():
    log_probs = torch.randn(4, 7, dtype=torch.float64).log_softmax(dim=1)
    expected = [stats.entropy(row) for row in log_probs.exp().numpy()]
    assert te.categorical_entropy(log_probs).tolist() == pytest.approx(expected)
    far = torch.tensor([[0.0, -200.0]]).log_softmax(dim=1)
    assert te.categorical_entropy(far).tolist() == [0.0]
    ours = te.value_loss(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]))
    assert ours.item() == pytest.approx((4 + 1) / 2 / 2)
    with pytest.raises(AssertionError):
        te.value_loss(torch.zeros(3), torch.zeros(3, 3))


# ---- 3  groups, the update -----------------------------------------------------------------------


def test_groups_lose_and_repeat_no_text():
    number, length = 60, 3
    actions = torch.arange(number)[:, None] * 10 + torch.arange(length)
    batch = te.Batch(actions, actions / 7.0, actions * 2.0)
    generator = torch.Generator().manual_seed(5)
    first = te.form_groups(batch, 4, generator)
    second = te.form_groups(batch, 4, generator)
    again = te.form_groups(batch, 4, torch.Generator().manual_seed(5))
    assert first.actions.shape == first.logp_old.shape == first.rewards.shape == (15, 4, 3)
    for grouped in (first, second):
        rows = grouped.actions.flatten(0, 1)
        assert sorted(rows.tolist()) == actions.tolist()  # all of them, characters in order
        assert torch.equal(grouped.logp_old, grouped.actions / 7.0)  # a text keeps what is its own
        assert torch.equal(grouped.rewards, grouped.actions * 2.0)
    assert torch.equal(first.actions, again.actions)
    assert not torch.equal(first.actions, second.actions)
    assert not torch.equal(first.actions.flatten(0, 1), actions)


def test_groups_differ_between_updates_and_by_the_seed(monkeypatch):
    def orders(seed: str) -> list:
        trainer, seen = make_trainer("--seed", seed, "--num_trajectories", "16"), []
        actions = torch.arange(16)[:, None].expand(16, 5)
        fixed = te.Batch(actions, torch.zeros(16, 5), torch.rand(16, 5))
        with monkeypatch.context() as patch:
            patch.setattr(te, "sample_batch", lambda *_: fixed)
            patch.setattr(te, "update_model", lambda t, b, *_: seen.append(b.actions[..., 0]) or {})
            for _ in range(3):
                trainer.update()
        assert all(x.shape == (2, 8) for x in seen)
        return [x.tolist() for x in seen]

    one, again, two = orders("1"), orders("1"), orders("2")
    assert one == again and len({str(x) for x in one + two}) == 6


def loop_scores(args, rewards) -> tuple[list, list]:
    """Groups of what is compared, and the unit of each: rewards (B, K, L) as nested lists."""
    if args.supervision == "process":
        length = len(rewards[0][0])
        groups = [[sum(text[t:]) for text in group] for group in rewards for t in range(length)]
    else:
        groups = [[sum(text) for text in group] for group in rewards]
    if args.normalize_returns:
        flat = [score for group in groups for score in group]
        mean, std = statistics.mean(flat), statistics.stdev(flat)
        groups = [[(score - mean) / (std + 1e-4) for score in group] for group in groups]
    if args.temperature == "auto":
        return groups, [statistics.stdev(group) + 1e-4 for group in groups]
    return groups, [args.temperature] * len(groups)


@pytest.mark.parametrize("supervision", ["outcome", "process"])
@pytest.mark.parametrize(
    "flags",
    [[], ["--temperature", "0.3"], ["--normalize_returns", "--temperature", "2"]],
    ids=" ".join,
)
def test_scores_and_units_in_loops(flags, supervision):
    args = make_args("--supervision", supervision, *flags)
    rewards = torch.rand(3, 4, 5, dtype=torch.float64)
    scores, units = te.prepare_inputs(args, batch_of(rewards))
    groups, expected = loop_scores(args, rewards.tolist())
    shape = (3, 5, 4) if supervision == "process" else (3, 4)
    assert scores.shape == shape and units.shape == (*shape[:-1], 1)
    close(scores.reshape(-1, 4), double(groups), 1e-9)
    close(units.flatten(), double(expected), 1e-9)


def loop_clip(ratio, advantage: float, epsilon: float):
    low, high = double(1 - epsilon), double(1 + epsilon)
    return min(ratio * advantage, min(max(ratio, low), high) * advantage)


def loop_loss(args, ratio, rewards):
    """The estimator's loss from single ratios[b][k][t], tensors of one number."""
    size, length = len(rewards[0]), len(rewards[0][0])
    if args.adv_estimator == "group_norm":
        total = 0.0
        for b, group in enumerate(rewards):
            if args.supervision == "process":
                advantages = loop_process(group)
            else:
                returns = [sum(text) for text in group]
                mean, std = statistics.mean(returns), statistics.stdev(returns)
                flat = max(returns) == min(returns)
                advantages = [
                    [0.0 if flat else (r - mean) / (std + 1e-4)] * length for r in returns
                ]
            for k in range(size):
                for t in range(length):
                    total = total - loop_clip(ratio[b][k][t], advantages[k][t], args.clip_epsilon)
        return total / (len(rewards) * size * length)
    groups, units = loop_scores(args, rewards)
    if args.supervision == "process":
        log_weights = [
            [ratio[b][k][t].log() for k in range(size)]
            for b in range(len(rewards))
            for t in range(length)
        ]
    elif args.trajectory_weight == "sum":
        log_weights = [[sum(rho.log() for rho in text) for text in group] for group in ratio]
    else:
        log_weights = [[(sum(text) / length).log() for text in group] for group in ratio]
    total = 0.0
    for w, scores, unit in zip(log_weights, groups, units, strict=True):
        for i, j in pairs(size):
            x, dw = (scores[i] - scores[j]) / unit, w[i] - w[j]
            if args.adv_estimator == "pairwise_linear":
                total = total - log_sigmoid(x) * dw
            else:
                p = sigmoid(x)
                total = total - p * dw.sigmoid().log() - (1 - p) * (-dw).sigmoid().log()
    return total / (len(groups) * len(pairs(size)))


def transcription(trainer: te.Trainer, batch: te.Batch) -> dict[str, float]:
    """update_model a character at a time, SGD with rate 0.1. Means of the metrics over passes."""
    args, seen, rewards = trainer.args, [], batch.rewards.tolist()
    texts = [(b, k) for b in range(len(rewards)) for k in range(len(rewards[0]))]
    length = len(rewards[0][0])

    def log_pi(b: int, k: int, t: int) -> torch.Tensor:
        logits = trainer.actor(trainer.positions[t][None])[0]
        return logits[batch.actions[b, k, t]] - logits.exp().sum().log()

    for _ in range(args.num_updates_per_batch):
        ratio = [
            [
                [(log_pi(b, k, t) - batch.logp_old[b, k, t]).exp() for t in range(length)]
                for k in range(len(rewards[0]))
            ]
            for b in range(len(rewards))
        ]
        loss, entropy = loop_loss(args, ratio, rewards), 0.0
        for t in range(length):
            probs = trainer.actor(trainer.positions[t][None])[0].softmax(dim=0)
            entropy = entropy - sum(p * p.log() for p in probs) / length
        one = {"policy_loss": loss, "entropy": entropy}
        flat = [ratio[b][k][t].item() for b, k in texts for t in range(length)]
        one["ratio_deviation"] = statistics.mean(abs(rho - 1) for rho in flat)
        one["clipfrac"] = statistics.mean(abs(rho - 1) > args.clip_epsilon for rho in flat)
        critic = []
        if args.hybrid_coef > 0:
            term = error = 0.0
            for b, k in texts:
                for t in range(length):
                    value = trainer.critic(trainer.positions[t][None])[0, 0]
                    following = sum(rewards[b][k][t:])
                    advantage = following - value.item()
                    term = term - loop_clip(ratio[b][k][t], advantage, args.clip_epsilon)
                    error = error + 0.5 * (value - following) ** 2
            loss = loss + args.hybrid_coef * term / len(flat)
            one["value_loss"] = error / len(flat)
            parameters = [*trainer.critic.parameters()]
            steps = torch.autograd.grad(error / len(flat), parameters, retain_graph=True)
            critic = [*zip(parameters, steps, strict=True)]
        parameters = [*trainer.actor.parameters()]
        steps = torch.autograd.grad(loss - args.entropy_coef * entropy, parameters)
        norm = math.sqrt(sum(g.square().sum().item() for g in steps))
        one["grad_norm"] = norm  # before the clip
        for p, g in zip(parameters, steps, strict=True):
            p.data -= 0.1 * g * min(1.0, args.max_grad_norm / norm)
        for p, g in critic:
            p.data -= 0.1 * g
        seen.append({name: float(torch.as_tensor(value).detach()) for name, value in one.items()})
    means = {name: statistics.mean(one[name] for one in seen) for name in seen[0]}
    logs = [
        (batch.logp_old[b, k, t] - log_pi(b, k, t)).item() for b, k in texts for t in range(length)
    ]
    means["approx_kl_k1"] = statistics.mean(logs)  # after the last step
    means["approx_kl"] = statistics.mean(math.exp(-x) - 1 + x for x in logs)
    return {f"losses/{name}": value for name, value in means.items()}


def off_policy(flags: list[str]) -> tuple[te.Trainer, te.Batch]:
    """A trainer in float64 and three groups of four texts, the last flat, from another policy."""
    trainer = make_trainer(*SMALL, "--hidden_size", "4", *flags)
    networks = [part for name, part in trainer.parts.items() if name != "optimizer"]
    for network in networks:
        network.double()
        for p in network.parameters():
            p.data += 0.2 * torch.randn_like(p)
    trainer.positions = trainer.positions.double()
    actions = torch.randint(3, (3, 4, 3))
    logp = trainer.log_probs()[torch.arange(3), actions]
    rewards = torch.rand(3, 4, 3, dtype=torch.float64)
    rewards[2] = torch.tensor([0.25, 0.25, 0.25])
    return trainer, te.Batch(actions, logp + 0.3 * torch.randn_like(logp), rewards)


UPDATES = [
    [],
    ["--temperature", "0.3"],
    ["--normalize_returns", "--temperature", "0.3"],
    ["--normalize_returns", "--temperature", "0.7"],
    ["--trajectory_weight", "sum"],
    ["--supervision", "process"],
    ["--supervision", "process", "--temperature", "0.4", "--normalize_returns"],
    ["--hybrid_coef", "0.7"],
    ["--hybrid_coef", "0.7", "--supervision", "process", "--clip_epsilon", "0.1"],
    ["--max_grad_norm", "inf", "--clip_epsilon", "0.35"],
    ["--num_updates_per_batch", "1", "--entropy_coef", "0"],
]


PAIRS_ONLY = {"--temperature", "--normalize_returns", "--trajectory_weight"}
CASES = [
    (estimator, flags)
    for estimator in ESTIMATORS
    for flags in UPDATES
    if estimator in PAIRWISE or not PAIRS_ONLY & set(flags)
]


@pytest.mark.parametrize("estimator,flags", CASES)
def test_update_in_loops(estimator, flags):
    defaults = ["--num_updates_per_batch", "3", "--max_grad_norm", "0.02", "--entropy_coef", "0.3"]
    trainer, batch = off_policy([*defaults, "--adv_estimator", estimator, *flags])
    ours = copy.copy(trainer)
    ours.actor = copy.deepcopy(trainer.actor)
    ours.parts = {"actor": ours.actor}
    if "critic" in trainer.parts:
        ours.parts["critic"] = ours.critic = copy.deepcopy(trainer.critic)
    taken, before = sgd(ours), weights(ours)
    found = te.update_model(ours, batch, *te.prepare_inputs(trainer.args, batch))
    expected = transcription(trainer, batch)
    assert len(taken) == trainer.args.num_updates_per_batch
    for part in ours.parts:
        # clip_grad_norm_ adds 1e-6 to the norm
        close(weights(ours, part), weights(trainer, part), 2e-6 if "inf" not in flags else 1e-10)
    assert (weights(ours) - before).abs().max() > 1e-4
    assert found.keys() == expected.keys()
    assert 0.05 < found["losses/clipfrac"] < 0.95 and expected["losses/grad_norm"] > 0.03
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


@pytest.mark.parametrize("hybrid", ["0", "0.5"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_ratio_is_one_in_the_first_pass_only(estimator, hybrid):
    """Erratum 18: KL is measured after the step, so it is not 0."""
    flags = ["--adv_estimator", estimator, "--hybrid_coef", hybrid]
    one = make_trainer(*flags).update()
    assert one["losses/ratio_deviation"] == one["losses/clipfrac"] == 0.0
    assert one["losses/approx_kl"] > 1e-7 and one["losses/approx_kl_k1"] != 0
    more = make_trainer(*flags, "--num_updates_per_batch", "8").update()
    assert more["losses/ratio_deviation"] > 1e-3
    assert more["losses/approx_kl"] > one["losses/approx_kl"]


def test_k1_can_be_negative_and_k3_cannot():
    trainer = make_trainer()
    rows = [trainer.update() for _ in range(40)]
    assert min(row["losses/approx_kl_k1"] for row in rows) < 0
    assert min(row["losses/approx_kl"] for row in rows) > 0


def test_rows_of_an_update():
    """What is told of a batch, from the batch; the temperature in use."""
    for estimator in ESTIMATORS:
        trainer = make_trainer("--adv_estimator", estimator, "--group_size", "4")
        for _ in range(10):
            row = trainer.update()
        groups = [[round(sum(text), 5) for text in g] for g in trainer.last.rewards.tolist()]
        flat = [score for group in groups for score in group]
        assert len(groups) == 32 and len(flat) == 128
        expected = {
            "score/mean": statistics.mean(flat),
            "score/max": max(flat),
            "score/min": min(flat),
            "charts/episodic_return": statistics.mean(flat),
            "charts/episodic_length": 5,
            "charts/learning_rate": 3e-3,
            "group/reward_std": statistics.mean(map(statistics.stdev, groups)),
        }
        if estimator != "group_norm":
            expected["group/temperature"] = expected["group/reward_std"] + 1e-4
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, abs=1e-5), name
        told = {name for name in row if not name.startswith("losses/")}
        assert told == expected.keys() | {"group/zero_std_frac"}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_right_characters_at_other_places_are_the_same_return(estimator):
    """All texts have two right ones of five, at places of their own: a flat group."""
    places = itertools.combinations(range(5), 2)
    rewards = torch.tensor([[[te.RIGHT if t in p else te.WRONG for t in range(5)] for p in places]])
    args = make_args("--adv_estimator", estimator)
    scores, _ = te.prepare_inputs(args, batch_of(rewards))
    assert te.flat_groups(scores).tolist() == [True]
    assert torch.equal(slope_at_pi_old(rewards, "--adv_estimator", estimator), 0 * rewards)


def test_zero_std_frac_counts_all_flat_groups(monkeypatch):
    right = torch.stack([torch.randperm(32) < 16 for _ in range(16)])
    rewards = torch.where(right, te.RIGHT, te.WRONG)
    trainer = make_trainer("--target", LONG, "--num_trajectories", "16")
    batch = te.Batch(torch.zeros(16, 32).long(), torch.zeros(16, 32), rewards)
    monkeypatch.setattr(te, "sample_batch", lambda *_: batch)
    row = trainer.update()
    assert row["group/reward_std"] == pytest.approx(0, abs=1e-5)
    assert row["group/zero_std_frac"] == 1.0


def test_zero_std_frac(monkeypatch):
    rewards = torch.zeros(16, 5)
    rewards[0] = 1.0  # the others are alike
    trainer = make_trainer("--num_trajectories", "16", "--group_size", "4")
    batch = te.Batch(torch.zeros(16, 5).long(), torch.zeros(16, 5), rewards)
    monkeypatch.setattr(te, "sample_batch", lambda *_: batch)
    assert trainer.update()["group/zero_std_frac"] == 0.75


def test_adam_and_the_gradients_clip():
    trainer = make_trainer("--learning_rate", "0.004", "--max_grad_norm", "0.0001")
    before = weights(trainer)
    assert trainer.update()["losses/grad_norm"] > 0.001
    norm = torch.stack([p.grad.norm() for p in trainer.actor.parameters()]).norm().item()
    assert norm == pytest.approx(0.0001, rel=1e-1)
    step = (weights(trainer) - before).abs().max().item()
    assert step == pytest.approx(0.004, rel=0.1)  # Adam's first step is the learning rate


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_entropy_bonus_raises_entropy(estimator):
    """Erratum 19, near uniform: no signal but the bonus."""
    trainer = make_trainer("--adv_estimator", estimator, "--entropy_coef", "0.5")
    for p in trainer.actor.parameters():
        p.data *= 3
    taken, rewards = sgd(trainer), torch.zeros(2, 4, 5)
    actions = torch.randint(26, (2, 4, 5))
    logp = trainer.log_probs()[torch.arange(5), actions]
    before = te.categorical_entropy(trainer.log_probs()).mean()
    batch = te.Batch(actions, logp, rewards)
    te.update_model(trainer, batch, *te.prepare_inputs(trainer.args, batch))
    assert taken and te.categorical_entropy(trainer.log_probs()).mean() > before


def test_the_critic_changes_nothing_but_by_its_term():
    """The actor starts as without one; a tiny weight is nearly none."""
    plain, hybrid = make_trainer(), make_trainer("--hybrid_coef", "1e-12")
    assert torch.equal(weights(plain), weights(hybrid)) and "critic" not in plain.parts
    before = weights(hybrid, "critic")
    assert "losses/value_loss" in hybrid.update() and "losses/value_loss" not in plain.update()
    close(weights(plain), weights(hybrid), 1e-5)
    assert not torch.equal(weights(hybrid, "critic"), before)


def test_the_critic_learns_the_expected_reward_to_go():
    trainer = make_trainer("--hybrid_coef", "0.1", "--learning_rate", "1e-2", *SMALL)
    trainer.log_probs = lambda: torch.full((3, 3), math.log(1 / 3))  # it always sees uniform texts
    errors = [trainer.update()["losses/value_loss"] for _ in range(300)]
    values = trainer.critic(trainer.positions).squeeze(1).tolist()
    mean = (1 - 0.2) / 3
    assert values == pytest.approx([3 * mean, 2 * mean, mean], abs=0.1)
    variance = (1.1**2) * 2 / 9
    assert statistics.mean(errors[-50:]) == pytest.approx(0.5 * variance * 2, rel=0.1)


# ---- 4  offline ----------------------------------------------------------------------------------


def short(folder: Path, name: str, *flags: str) -> list[str]:
    """A run of 30 updates with three checkpoints, evaluated at other updates."""
    line = "--quiet --threads 1 --max_steps 30 --save_steps 8 --eval_every 7 --target_return 0 "
    line += f"--num_trajectories 16 --group_size 4 --run_name {name}"
    return [*line.split(), "--output_dir", str(folder), *flags]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Texts of a run of five updates of 16, and the run."""
    folder = tmp_path_factory.mktemp("data")
    flags = ["--max_steps", "5", "--save_trajectories", str(folder / "texts.npz")]
    assert te.main(short(folder, "online", *flags)) == 0
    return folder / "texts.npz"


MANY = [
    [],
    ["--adv_estimator", "pairwise_linear", "--supervision", "process"],
    ["--adv_estimator", "group_norm", "--num_updates_per_batch", "4", "--hybrid_coef", "0.3"],
]


@pytest.mark.parametrize("flags", MANY)
def test_offline_equals_online(flags, tmp_path):
    """Nothing of the environment is used, and with the same seed nothing is different."""
    path = str(tmp_path / "texts.npz")
    assert te.main(short(tmp_path, "online", *flags, "--save_trajectories", path)) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te, "sample_batch", None)
        assert te.main(short(tmp_path, "offline", *flags, "--offline", path)) == 0
    online, offline = (tmp_path / te.SCRIPT / name for name in ("online", "offline"))
    assert same(state(online)["parts"], state(offline)["parts"])
    assert state(online)["counters"] == (30, 30 * 16 * 5)
    assert state(offline)["counters"] == (30, 0)
    strip = lambda rows: [{k: v for k, v in r.items() if "env_steps" not in k} for r in rows]  # noqa: E731
    assert strip(metrics(online)) == strip(metrics(offline))


def test_content_of_the_file(data, tmp_path):
    """All texts in the order they were written in, before they were grouped."""
    file = np.load(data)
    assert set(file) == {"actions", "logp_old", "rewards", "target", "charset"}
    assert file["target"] == "hello" and file["charset"] == te.CHARSETS["english"][1]
    assert file["actions"].shape == file["logp_old"].shape == file["rewards"].shape == (80, 5)
    env = te.MultilingualTextEnv()
    for actions, rewards in zip(file["actions"], file["rewards"], strict=True):
        env.reset()
        assert [env.step(a)[1] for a in actions] == pytest.approx(rewards.tolist())
    trainer = te.Trainer(te.parse_args(short(tmp_path, "a")))
    for k in range(5):
        log_probs = trainer.log_probs()
        ours = te.sample_batch(log_probs, trainer.target, 16, 1.0, copy_of(trainer.generator))
        rows = slice(16 * k, 16 * k + 16)
        assert (file["actions"][rows] == ours.actions.numpy()).all()
        assert (file["logp_old"][rows] == ours.logp_old.numpy()).all()
        trainer.update()


def copy_of(generator: torch.Generator) -> torch.Generator:
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    return twin


def test_the_data_come_again_from_the_first_batch(data, tmp_path, monkeypatch):
    seen, real = [], te.form_groups
    monkeypatch.setattr(te, "form_groups", lambda b, *a: seen.append(b.actions) or real(b, *a))
    trainer = te.Trainer(te.parse_args(short(tmp_path, "a", "--offline", str(data))))
    for _ in range(12):
        trainer.update()
    file = torch.from_numpy(np.load(data)["actions"])
    for k, actions in enumerate(seen):
        assert torch.equal(actions, file[16 * (k % 5) : 16 * (k % 5) + 16])
    monkeypatch.undo()
    other = ["--num_trajectories", "40", "--group_size", "10", "--offline", str(data)]
    trainer = te.Trainer(te.parse_args(short(tmp_path, "a", *other)))
    assert len(trainer.data) == 2
    trainer.update()
    assert trainer.last.actions.shape == (4, 10, 5) and trainer.env_steps == 0
    assert (tmp_path / te.SCRIPT).exists() is False


@pytest.mark.parametrize("temperature", ["0.5", "1"])
def test_where_offline_training_stops(temperature, tmp_path):
    """Uniform texts, the true trajectory weight: pi becomes pi_old * exp(R / T), per position
    e^(1.1/T) / (e^(1.1/T) + A - 1) for the right character.
    """
    generator = torch.Generator().manual_seed(0)
    uniform, target = torch.full((3, 3), math.log(1 / 3)), torch.tensor([2, 0, 1])
    args = make_args(*SMALL)
    path = str(tmp_path / "uniform.npz")
    te.save_trajectories(path, [te.sample_batch(uniform, target, 256, 1.0, generator)], args)
    flags = ["--offline", path, "--num_trajectories", "256", "--trajectory_weight", "sum"]
    flags += ["--entropy_coef", "0", "--temperature", temperature, "--learning_rate", "0.03"]
    trainer = make_trainer(*SMALL, *flags, "--max_grad_norm", "inf")
    for _ in range(250):
        trainer.update()
    unit = math.exp(1.1 / float(temperature))
    p = trainer.log_probs()[torch.arange(3), target].exp().tolist()
    assert p == pytest.approx([unit / (unit + 2)] * 3, abs=2e-3)
    others = trainer.log_probs().exp()
    assert others[0, 0].item() == pytest.approx(others[0, 1].item(), abs=2e-3)


def test_offline_learns(tmp_path):
    """Texts of an untrained policy, over and over: the most likely text becomes the target."""
    path = str(tmp_path / "texts.npz")
    flags = ["--num_trajectories", "512", "--target_return", "0", "--output_dir", str(tmp_path)]
    te.train(make_args(*flags, "--max_steps", "1", "--save_trajectories", path))
    result = te.train(make_args(*flags, "--offline", path, "--max_steps", "100"))
    assert result["greedy"] == "hello" and result["env_steps"] == 0


# ---- 5  evaluation -------------------------------------------------------------------------------


@pytest.mark.parametrize("boost", [0.5, 3.0])
def test_evaluation_is_exact(boost):
    """Against 20,000 texts, within four standard errors."""
    trainer = make_trainer()
    logits = torch.randn(5, 26)
    logits[torch.arange(5), trainer.target] += boost + torch.arange(5) / 2
    log_probs = logits.log_softmax(dim=1)
    result = te.evaluate(log_probs, trainer.target)
    batch = te.sample_batch(log_probs, trainer.target, 20_000, 1.0, trainer.generator)
    returns = batch.rewards.sum(dim=1).double()
    matches = (batch.actions == trainer.target).all(dim=1).double()
    for name, sample in (("expected_return", returns), ("match_probability", matches)):
        error = sample.std().item() / math.sqrt(20_000)
        assert abs(result[f"eval/{name}"] - sample.mean().item()) < 4 * error + 1e-6
    right = [logits[t].argmax().item() == trainer.target[t].item() for t in range(5)]
    assert result["eval/greedy_right"] == sum(right)
    assert result["eval/greedy_match"] == float(all(right)) and result.keys() == {
        "eval/expected_return",
        "eval/match_probability",
        "eval/greedy_right",
        "eval/greedy_match",
    }


def test_evaluation_by_hand():
    log_probs = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]).log()
    log_probs[1, 0] += 1e-3
    result = te.evaluate(log_probs, torch.tensor([1, 0, 1]))
    assert result["eval/expected_return"] == pytest.approx(1.4 - 0.1 * 1.6, abs=2e-3)
    assert result["eval/match_probability"] == pytest.approx(0.04, abs=1e-3)
    assert result["eval/greedy_right"] == 2 and result["eval/greedy_match"] == 0
    result = te.evaluate(log_probs, torch.tensor([1, 0, 0]))
    assert result["eval/greedy_right"] == 3 and result["eval/greedy_match"] == 1


def test_solved():
    told = lambda a, b: {"eval/expected_return": a, "eval/greedy_match": b}  # noqa: E731
    assert te.solved(told(4.75, 1.0), 4.75) and not te.solved(told(4.74, 1.0), 4.75)
    assert not te.solved(told(4.9, 0.0), 4.75)
    for scale in ("1", "3"):  # before --reward_scale
        args = make_args("--reward_scale", scale)
        assert te.threshold(args) == args.target_return == 4.75
    assert make_args("--target", LONG).target_return == pytest.approx(30.4)
    assert make_args("--target_return", "2").target_return == 2


def test_early_stop(tmp_path, monkeypatch):
    def run(name: str, *flags: str) -> dict:
        flags = ("--eval_every", "10", "--max_steps", "35", *flags)
        return te.train(te.parse_args([*short(tmp_path, name), *flags]))

    told = dict.fromkeys(("eval/match_probability", "eval/greedy_right"), 0.0)
    told |= {"eval/expected_return": 4.75, "eval/greedy_match": 1.0}
    monkeypatch.setattr(te, "evaluate", lambda *_: dict(told))
    result = run("a", "--target_return", "4.75")
    assert result["step"] == 10 and result["solved"] and not result["stopped"]
    result = run("b", "--target_return", "0")
    assert result["step"] == 35 and result["solved"]
    assert run("c", "--target_return", "4.76")["step"] == 35
    assert run("d", "--target_return", "4.75", "--eval_every", "0")["step"] == 35
    told["eval/expected_return"] = 4.7
    result = run("e", "--target_return", "4.7")
    assert result["step"] == 10 and not result["solved"]  # what is asked for is no threshold
    told["eval/greedy_match"] = 0.0
    result = run("f", "--target_return", "1")
    assert result["step"] == 35 and not result["solved"] and not result["stopped"]
    rows = metrics(tmp_path / te.SCRIPT / "f")
    evaluated = [row["step"] for row in rows if "eval/greedy_match" in row]
    assert evaluated == [10, 20, 30, 35]


# ---- 6  run folder, checkpoints, resume ----------------------------------------------------------


def test_the_seed_reaches_networks_characters_and_groups():
    one, again, two = (make_trainer("--seed", seed) for seed in ("1", "1", "2"))
    for get in (weights, lambda t: t.generator.get_state(), lambda t: t.grouping.get_state()):
        assert torch.equal(get(one), get(again)) and not torch.equal(get(one), get(two))
    assert not torch.equal(one.generator.get_state(), one.grouping.get_state())


RUNS = [
    [],
    ["--adv_estimator", "pairwise_linear", "--trajectory_weight", "sum", "--temperature", "0.5"],
    ["--adv_estimator", "group_norm", "--num_updates_per_batch", "3", "--supervision", "process"],
    [
        "--hybrid_coef",
        "0.5",
        "--normalize_returns",
        "--temperature",
        "2",
        "--observation",
        "scalar",
    ],
    ["--offline", "DATA", "--num_updates_per_batch", "2"],
]


@pytest.mark.parametrize("flags", RUNS, ids=" ".join)
def test_resume_equals_never_stopping(flags, tmp_path, monkeypatch, data):
    flags = [str(data) if flag == "DATA" else flag for flag in flags]
    assert te.main(short(tmp_path, "whole", *flags)) == 0
    whole = tmp_path / te.SCRIPT / "whole"
    half, updates = check_resume(te, whole, "checkpoint-000008.pt", monkeypatch)
    assert updates == 22  # not all over again
    saved = {path.name for path in half.glob("*.pt")}
    assert saved == {f"checkpoint-{k}.pt" for k in ("000008", "000016", "000024", "last")}
    assert [row["step"] for row in metrics(whole)] == [*range(1, 31)]


def test_resume_after_a_crash_replaces_what_tensorboard_had(tmp_path):
    """Updates 9 to 30 were logged, but not saved: they are logged anew, and none is shown twice."""
    assert te.main(short(tmp_path, "a")) == 0
    folder = tmp_path / te.SCRIPT / "a"
    for k, path in enumerate(sorted(folder.glob("events*"))):  # written long ago
        path.rename(folder / f"events.out.tfevents.{k:010d}.first")
    for path in folder.glob("*.pt"):
        if path.name != "checkpoint-000008.pt":
            path.unlink()
    assert te.main(["--resume", str(folder / "checkpoint-000008.pt"), "--quiet"]) == 0
    events = events_of(folder)
    assert [e.step for e in events.Scalars("losses/policy_loss")] == [*range(1, 31)]


def test_the_same_seed_gives_the_same_run(tmp_path):
    for name, seed in (("one", "1"), ("again", "1"), ("other", "2")):
        assert te.main(short(tmp_path, name, "--max_steps", "15", "--seed", seed)) == 0
    one, again, other = (tmp_path / te.SCRIPT / name for name in ("one", "again", "other"))
    assert same(state(one), state(again)) and metrics(one) == metrics(again)
    assert not same(state(one)["parts"], state(other)["parts"])


def test_a_checkpoint_holds_all_that_a_trainer_has(tmp_path):
    one, two = (make_trainer("--seed", s, "--hybrid_coef", "0.2") for s in ("1", "2"))
    for _ in range(5):
        one.update()
    one.train_seconds = 1.5
    one.save_model(tmp_path / "a.pt")
    two.load_model(str(tmp_path / "a.pt"))
    assert two.train_seconds == 1.5 and not [*tmp_path.glob("*.tmp")]
    for _ in range(3):
        for part in one.parts:
            assert same(one.parts[part].state_dict(), two.parts[part].state_dict())
        assert (one.step, one.env_steps) == (two.step, two.env_steps)
        assert torch.equal(one.generator.get_state(), two.generator.get_state())
        assert torch.equal(one.grouping.get_state(), two.grouping.get_state())
        assert same(one.update(), two.update()) and one.texts() == two.texts()


def test_generators_of_another_kind_of_device_are_left_as_they_are(tmp_path):
    """CUDA's state has another shape than the CPU's."""
    trainer = make_trainer()
    trainer.save_model(tmp_path / "a.pt")
    checkpoint = te.load_checkpoint(str(tmp_path / "a.pt"))
    checkpoint["generators"] = tuple(torch.zeros(16, dtype=torch.uint8) for _ in range(2))
    torch.save(checkpoint, tmp_path / "b.pt")
    before = trainer.generator.get_state(), trainer.grouping.get_state()
    trainer.load_model(str(tmp_path / "b.pt"))
    assert same(before, (trainer.generator.get_state(), trainer.grouping.get_state()))


@pytest.mark.parametrize("offline", [False, True])
def test_interrupt_saves_and_resumes_exactly(offline, tmp_path, monkeypatch, capsys, data):
    more = ["--save_steps", "0", *(["--offline", str(data)] if offline else [])]
    flags = short(tmp_path, "a", *more)
    flags.remove("--quiet")
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, te, 5)
        assert te.main(flags) == 130
    assert signal.getsignal(signal.SIGINT) is before
    folder = tmp_path / te.SCRIPT / "a"
    text = capsys.readouterr().out
    assert f"go on: python {te.SCRIPT}.py --resume {folder}/checkpoint-last.pt" in text
    assert state(folder)["counters"][0] == 5
    assert metrics(folder)[-1]["step"] == 5 and "eval/expected_return" in metrics(folder)[-1]
    assert te.main(["--resume", str(folder / "checkpoint-last.pt"), "--quiet"]) == 0
    assert te.main(short(tmp_path, "b", *more)) == 0
    assert same(state(folder), state(tmp_path / te.SCRIPT / "b"))
    rows = [
        [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(path)]
        for path in (folder, tmp_path / te.SCRIPT / "b")
    ]
    assert rows[0] == rows[1]  # but for the evaluation at the interrupt
    if not offline:
        check_second_interrupt(te, short(tmp_path, "c"), monkeypatch, capsys)


def test_interrupt_before_the_first_update_leaves_something_to_resume(
    tmp_path, monkeypatch, capsys
):
    flags = short(tmp_path, "a", "--max_steps", "9")
    with monkeypatch.context() as patch:
        interrupt_first_evaluation(patch, te)
        assert te.main([flag for flag in flags if flag != "--quiet"]) == 130
    path = tmp_path / te.SCRIPT / "a" / "checkpoint-last.pt"
    assert str(path) in capsys.readouterr().out and path.exists()
    assert te.main(["--resume", str(path), "--quiet"]) == 0
    assert te.main(short(tmp_path, "b", "--max_steps", "9")) == 0
    assert same(state(path.parent)["parts"], state(tmp_path / te.SCRIPT / "b")["parts"])


def test_interrupt_before_the_first_update_with_texts_to_save(tmp_path, monkeypatch):
    interrupt_first_evaluation(monkeypatch, te)
    path = tmp_path / "texts.npz"
    assert te.main(short(tmp_path, "a", "--save_trajectories", str(path))) == 130


def test_interrupt_in_the_last_update_stops_nothing(tmp_path, monkeypatch):
    interrupt_at(monkeypatch, te, 9)
    assert te.main(short(tmp_path, "a", "--max_steps", "9")) == 0


def test_a_resumed_run_leaves_the_texts_of_the_first_part(tmp_path):
    path = tmp_path / "texts.npz"
    flags = ["--max_steps", "3", "--save_trajectories", str(path)]
    assert te.main(short(tmp_path, "a", *flags)) == 0
    before = path.read_bytes()
    last = tmp_path / te.SCRIPT / "a" / "checkpoint-last.pt"
    assert te.main(["--resume", str(last), "--max_steps", "5", "--quiet"]) == 0
    assert path.read_bytes() == before


def test_interrupted_run_saves_its_texts(tmp_path, monkeypatch):
    interrupt_at(monkeypatch, te, 3)
    path = tmp_path / "texts.npz"
    assert te.main(short(tmp_path, "a", "--save_trajectories", str(path))) == 130
    assert np.load(path)["actions"].shape == (48, 5)


def test_training_in_a_thread(tmp_path):
    """Signals can be set in the main thread only."""
    results = []
    args = te.parse_args(short(tmp_path, "a"))
    thread = threading.Thread(target=lambda: results.append(te.train(args)))
    thread.start()
    thread.join()
    assert results[0]["step"] == 30


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    assert te.main(short(tmp_path, "a", "--max_steps", "9")) == 0
    path = tmp_path / te.SCRIPT / "a" / "checkpoint-last.pt"
    flags = ["--resume", str(path), "--max_steps", "12"]
    assert str(path.parent) in check_full_disk(te, path, flags, monkeypatch, capsys)


def test_a_checkpoint_is_renamed_not_written_over(tmp_path, monkeypatch):
    trainer, path, written, write = make_trainer(), tmp_path / "a.pt", [], Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda p, d: written.append(p) or write(p, d))
    for _ in range(2):
        trainer.save_model(path)
    assert written == [path.with_suffix(".tmp")] * 2 and [*tmp_path.iterdir()] == [path]


def test_kill_while_saving_keeps_the_last_checkpoint(tmp_path):
    """kill -9 between writing the temporary file and renaming it, and in the middle of writing."""
    assert te.main(short(tmp_path, "a", "--max_steps", "9")) == 0
    folder = tmp_path / te.SCRIPT / "a"
    path = folder / "checkpoint-last.pt"
    check_kill_while_saving(te, path, "--max_steps", "12")
    assert metrics(folder)[-1]["step"] == 12  # each row is on the disk at once
    assert te.main(["--resume", str(path), "--max_steps", "12", "--quiet"]) == 0
    assert [row["step"] for row in metrics(folder)] == [*range(1, 13)]


@pytest.mark.parametrize("kind", ["scores", "scaling", "loss", "gradient"])
def test_nan_stops_the_run_and_names_the_tensor_and_the_update(kind, tmp_path, monkeypatch, capsys):
    name = {"loss": "policy_loss", "gradient": "categorical_entropy"}.get(kind, "prepare_inputs")
    real, calls = getattr(te, name), []

    def broken(*args):
        calls.append(1)
        result, bad = real(*args), math.nan if len(calls) == 4 else 1.0
        if kind == "scores":
            return result[0] * bad, result[1]
        if kind == "scaling":
            return result[0], result[1] * bad
        if kind == "gradient" and len(calls) == 4:  # the value is finite, its slope is not
            return result + (result.sum() * 0).sqrt()
        return result * bad

    monkeypatch.setattr(te, name, broken)
    assert te.main(short(tmp_path, "a", "--save_steps", "1")) == 1
    error = capsys.readouterr().err
    folder = tmp_path / te.SCRIPT / "a"
    assert f"update 4: {kind} is NaN" in error and str(folder) in error and error.count("\n") == 1
    assert state(folder)["counters"][0] == 3  # saved after each update
    assert all(v.isfinite().all() for v in state(folder)["parts"]["actor"].values())
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]


def test_nan_moves_no_weight(monkeypatch):
    trainer, real = make_trainer(), te.policy_loss
    before = weights(trainer)
    monkeypatch.setattr(te, "policy_loss", lambda *a: real(*a) * math.nan)
    with pytest.raises(FloatingPointError, match="loss is NaN"):
        trainer.update()
    assert torch.equal(weights(trainer), before)


@pytest.mark.parametrize("flags", MANY)
def test_run_folder_and_tags(flags, tmp_path):
    assert te.main(short(tmp_path, "a", *flags)) == 0
    folder = tmp_path / te.SCRIPT / "a"
    names = {path.name for path in folder.iterdir() if not path.name.startswith("events")}
    numbers = {f"checkpoint-{k:06d}.pt" for k in (8, 16, 24)}
    assert names == {"config.json", "metrics.jsonl", "checkpoint-last.pt"} | numbers
    config = json.loads((folder / "config.json").read_text())
    assert config.items() >= vars(te.parse_args(short(tmp_path, "a", *flags))).items()
    assert config["torch"] == torch.__version__ and config["numpy"] == np.__version__
    losses = "policy_loss entropy grad_norm ratio_deviation clipfrac approx_kl approx_kl_k1"
    losses += " value_loss" if "--hybrid_coef" in flags else ""
    charts = "episodic_return episodic_length learning_rate env_steps train_seconds SPS"
    expected = {f"losses/{name}" for name in losses.split()}
    expected |= {f"charts/{name}" for name in charts.split()}
    expected |= {"score/mean", "score/max", "score/min", "group/zero_std_frac", "group/reward_std"}
    expected |= set() if "group_norm" in flags else {"group/temperature"}
    evaluated = {"expected_return", "match_probability", "greedy_right", "greedy_match"}
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 31)]
    for row in rows:
        due = row["step"] in (7, 14, 21, 28, 30)
        more = {f"eval/{name}" for name in evaluated} if due else set()
        assert row.keys() == expected | more | {"step"}
        assert all(math.isfinite(v) for v in row.values())
        assert row["charts/env_steps"] == row["step"] * 80
        speed = row["charts/env_steps"] / row["charts/train_seconds"]
        assert row["charts/SPS"] == pytest.approx(speed)
    events = events_of(folder, tensors=0)
    tags = {f"{kind}/{name}" for name in evaluated for kind in ("eval", "hparam")}
    assert set(events.Tags()["scalars"]) == expected | tags
    told = [(e.step, e.value) for e in events.Scalars("losses/policy_loss")]
    assert told == [
        (row["step"], pytest.approx(row["losses/policy_loss"], rel=1e-5)) for row in rows
    ]
    for name in ("greedy", "best", "worst"):
        texts = events.Tensors(f"text/{name}/text_summary")
        assert [e.step for e in texts] == [7, 14, 21, 28, 30]
        assert all(len(e.tensor_proto.string_val[0]) == 5 for e in texts)
    kept = (folder / "metrics.jsonl").read_text()
    assert te.main(short(tmp_path, "a", "--max_steps", "3")) == 0
    assert te.main(short(tmp_path, "a", "--max_steps", "3")) == 0
    assert {p.name for p in folder.parent.iterdir()} == {"a", "a-2", "a-3"}  # never overwritten
    assert (folder / "metrics.jsonl").read_text() == kept


def test_best_and_worst_text():
    trainer = make_trainer("--num_trajectories", "64")
    assert trainer.texts().keys() == {"greedy"}
    for _ in range(15):
        trainer.update()
        texts = trainer.texts()
        batch = [te.decode(row, trainer.args.charset) for row in trainer.last.actions.flatten(0, 1)]
        right = [sum(a == b for a, b in zip(text, "hello", strict=True)) for text in batch]
        assert right[batch.index(texts["best"])] == max(right)
        assert right[batch.index(texts["worst"])] == min(right) < max(right)
        greedy = trainer.log_probs().argmax(dim=1)
        assert texts["greedy"] == "".join(trainer.args.charset[a] for a in greedy)


def test_result_and_summary(tmp_path, capsys):
    flags = ["--output_dir", str(tmp_path), "--threads", "1", "--run_name", "a"]
    assert te.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = tmp_path / te.SCRIPT / "a"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert lines[-4].startswith(f"solved: expected return {last['eval/expected_return']:.2f} of 5")
    assert "(threshold 4.75)" in lines[-4]
    assert f"{last['step']:,} updates, {last['charts/env_steps']:,} environment steps" in lines[-3]
    assert lines[-2] == f"logs: {folder}    watch: tensorboard --logdir {tmp_path}"
    assert lines[-1] == "target 'hello', greedy 'hello', match: True"
    assert te.main([*flags, "--max_steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].startswith("not solved: ") and lines[-1].endswith("match: False")
    assert "--resume" not in "".join(lines[-4:])
    result = te.train(te.parse_args([*flags, "--quiet"]))
    assert result["run_dir"] == f"{folder}-3" and result["env_steps"] == result["step"] * 640
    exact = te.evaluate(*evaluated_policy(Path(result["run_dir"])))
    assert {f"eval/{k}": v for k, v in result.items() if f"eval/{k}" in exact} == exact
    assert 0 < result["train_seconds"] < result["seconds"] and result["solved"] is True


def evaluated_policy(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    checkpoint = te.load_checkpoint(str(folder / "checkpoint-last.pt"))
    trainer = te.Trainer(argparse.Namespace(**checkpoint["config"]))
    trainer.actor.load_state_dict(checkpoint["parts"]["actor"])
    return trainer.log_probs(), trainer.target


@pytest.mark.parametrize("scale", ["1", "2"])
def test_infer(scale, tmp_path, capsys):
    flags = ["--target_return", "4.9", "--max_steps", "400", "--reward_scale", scale]
    flags += ["--num_trajectories", "64"]
    assert te.main([*short(tmp_path, "a"), *flags]) == 0
    path = tmp_path / te.SCRIPT / "a" / "checkpoint-last.pt"
    before = path.read_bytes(), sorted(path.parent.iterdir())
    assert te.main(["--infer", str(path)]) == 0
    text = capsys.readouterr().out
    lines, last = text.splitlines(), metrics(path.parent)[-1]
    assert lines[:5] == [f"{'hello'[:k].ljust(5, '.')}  (target hello)" for k in range(1, 6)]
    total = 5 * float(scale)
    assert lines[5] == f"target 'hello', greedy 'hello', match: True, return {total:.2f}"
    assert f" {last['eval/expected_return']:.2f} of 5;" in lines[6]
    assert f"; {last['eval/match_probability']:.1%} of samples" in lines[6]
    assert lines[7].startswith("samples: ") and lines[7].count("'") == 6 and len(lines) == 8
    assert te.main(["--infer", str(path)]) == 0
    assert capsys.readouterr().out == text  # the same seed shows the same
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before


def test_infer_samples_are_the_policys(tmp_path, capsys):
    assert te.main(short(tmp_path, "a", "--max_steps", "2")) == 0
    path = str(tmp_path / te.SCRIPT / "a" / "checkpoint-last.pt")
    samples = []
    for seed in ("1", "1", "2"):
        assert te.main(["--infer", path, "--seed", seed]) == 0
        lines = capsys.readouterr().out.splitlines()
        samples.append(lines[-1])
        assert "match: False" in lines[5]
    assert samples[0] == samples[1] != samples[2]


def test_network():
    """Orthogonal weights of gain sqrt 2, sqrt 2 and the last one's, biases 0, ReLU between them."""
    trainer = make_trainer("--hidden_size", "48", "--hybrid_coef", "1", *SMALL)
    for net, gain, rows in ((trainer.actor, 0.01, 3), (trainer.critic, 1.0, 1)):
        (w1, b1), (w2, b2), (w3, b3) = ((x.weight, x.bias) for x in net[::2])
        close(w1.T @ w1, 2 * torch.eye(3), 1e-5)
        close(w2.T @ w2, 2 * torch.eye(48), 1e-5)
        close(w3 @ w3.T / gain**2, torch.eye(rows), 1e-5)
        assert not any(b.any() for b in (b1, b2, b3))
        x = torch.randn(7, 3)
        close(net(x), (w3 @ (w2 @ (w1 @ x.T).relu()).relu()).T, 1e-5)
    wide = make_trainer("--hidden_size", "7", "--language", "chinese")
    assert [p.shape for p in wide.actor.parameters()][-2] == (3759, 7)
    assert wide.positions.tolist() == torch.eye(4).tolist()
    scalar = make_trainer("--observation", "scalar")
    close(scalar.positions, torch.tensor([[0.0], [0.2], [0.4], [0.6], [0.8]]))


def test_flags_reach_where_they_act(tmp_path, monkeypatch):
    flags = ["--num_trajectories", "12", "--group_size", "3", "--reward_scale", "3"]
    trainer = make_trainer(
        *flags, "--learning_rate", "0.007", "--language", "code", *["--seed", "9"]
    )
    row = trainer.update()
    assert trainer.last.rewards.shape == (4, 3, 5) and trainer.env_steps == 60
    assert {round(r, 4) for r in trainer.last.rewards.flatten().tolist()} <= {3.0, -0.3}
    assert row["charts/learning_rate"] == 0.007 and trainer.args.target == "12345"
    assert te.decode(trainer.target, trainer.args.charset) == "12345"
    assert trainer.optimizer.param_groups[0]["lr"] == 0.007
    assert make_args("--target_template", "abc").target == "abc"
    assert make_args("--version", "v").run_name == "v"
    name = make_args("--adv_estimator", "group_norm", "--language", "code", "--seed", "3").run_name
    assert name == "group_norm-code-seed3"
    seen, real = [], te.Trainer.update

    def update(trainer):
        seen.append((torch.is_anomaly_enabled(), torch.get_num_threads()))
        return real(trainer)

    monkeypatch.setattr(te.Trainer, "update", update)
    for more in ([], ["--detect_anomaly", "--threads", "2"]):
        assert te.main(short(tmp_path, "a", "--max_steps", "1", *more)) == 0
    assert seen == [(False, 1), (True, 2)]
    torch.set_num_threads(1)
    assert te.main(short(tmp_path, "a", "--max_steps", "1", "--threads", "0")) == 0
    assert seen[-1] == (False, 1)


def test_evaluations_and_checkpoints_come_when_due(tmp_path):
    flags = ["--eval_every", "0", "--save_steps", "0", "--max_steps", "10"]
    assert te.main(short(tmp_path, "a", *flags)) == 0
    rows = metrics(tmp_path / te.SCRIPT / "a")
    assert [row["step"] for row in rows if "eval/greedy_right" in row] == [10]
    assert [p.name for p in (tmp_path / te.SCRIPT / "a").glob("*.pt")] == ["checkpoint-last.pt"]


# ---- 7  bad input --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    te.main(short(folder, "a"))
    return folder / te.SCRIPT / "a" / "checkpoint-last.pt"


BAD = [
    ("--num_trajectories 6 --group_size 4", "group_size", "2, 3, 6"),
    ("--num_trajectories 1", "group_size", "nothing does"),
    ("--group_size 256", "group_size", "2, 4, 8, 16, 32, 64, 128)"),
    ("--group_size 1", "group_size", "2..inf"),
    ("--num_trajectories 0", "num_trajectories", ""),
    ("--target EMPTY", "target", "empty"),
    ("--target Hallo", "target", "'H' of 'Hallo'"),
    ("--target 你好", "target", "'你好' of '你好'"),
    ("--language chinese --target hello", "target", "'helo' of 'hello'"),
    ("--language klingon", "language", ""),
    ("--language custom --target a", "charset", "--language custom"),
    ("--language custom --charset EMPTY --target a", "charset", ""),
    ("--language custom --charset abca --target a", "charset", "none twice"),
    ("--language custom --charset a --target a", "charset", "two"),
    ("--language custom --charset abc", "target", "empty"),
    ("--language custom --charset abc --target abd", "target", "'d'"),
    ("--charset abc --target a", "charset", "only then"),
    ("--temperature 0", "temperature", ""),
    ("--temperature -1", "temperature", ""),
    ("--temperature hot", "temperature", ""),
    ("--temperature nan", "temperature", ""),
    ("--reward_scale 0", "reward_scale", ""),
    ("--reward_scale -1", "reward_scale", ""),
    ("--hidden_size 0", "hidden_size", ""),
    ("--learning_rate 2", "learning_rate", ""),
    ("--max_grad_norm 0", "max_grad_norm", ""),
    ("--clip_epsilon -0.1", "clip_epsilon", ""),
    ("--entropy_coef -1", "entropy_coef", ""),
    ("--hybrid_coef -1", "hybrid_coef", ""),
    ("--num_updates_per_batch 0", "num_updates_per_batch", ""),
    ("--max_steps 0", "max_steps", ""),
    ("--save_steps -1", "save_steps", ""),
    ("--eval_every -1", "eval_every", ""),
    ("--target_return -1", "target_return", ""),
    ("--target_return nan", "target_return", ""),
    ("--threads -1", "threads", ""),
    ("--seed 2147483648", "seed", ""),
    ("--seed x", "seed", "int"),
    ("--adv_estimator gae", "adv_estimator", ""),
    ("--observation twohot", "observation", ""),
    ("--supervision none", "supervision", ""),
    ("--trajectory_weight max", "trajectory_weight", ""),
    ("--device nonsense", "device", ""),
    ("--run_name a/b", "run_name", ""),
    ("--run_name ..", "run_name", ""),
    ("--run_name EMPTY", "run_name", ""),
    ("--adv_estimator group_norm --temperature 1", "temperature", "group_norm"),
    ("--adv_estimator group_norm --trajectory_weight sum", "trajectory_weight", "group_norm"),
    ("--adv_estimator group_norm --normalize_returns", "normalize_returns", "group_norm"),
    ("--normalize_returns", "normalize_returns", "auto"),
    ("--supervision process --trajectory_weight sum", "trajectory_weight", "process"),
    ("--save_trajectories DATA", "save_trajectories", "exists"),
    ("--save_trajectories NOWHERE", "save_trajectories", "can't be written"),
    ("--save_trajectories FOLDER", "save_trajectories", "exists"),
    ("--offline MISSING", "offline", "No such file"),
    ("--offline TEXT", "offline", "not a file of"),
    ("--offline CHECKPOINT", "offline", "not a file of"),
    ("--offline FOLDER", "offline", "directory"),
    ("--offline LACKING", "offline", "not a file of"),
    ("--offline RAGGED", "offline", "not a file of"),
    ("--offline LONGER", "offline", "not a file of"),
    ("--offline DATA --target hallo", "offline", "'hello'"),
    ("--offline DATA --language custom --charset helo --target hello", "offline", "alphabet"),
    ("--offline DATA --num_trajectories 32", "num_trajectories", "2, 4, 5, 8, 10, 16, 20, 40, 80"),
    ("--offline DATA --num_trajectories 16 --reward_scale 2", "reward_scale", "--offline"),
    (
        "--offline DATA --num_trajectories 16 --save_trajectories NEW",
        "save_trajectories",
        "--offline",
    ),
    ("--resume MISSING", "resume", ""),
    ("--resume TRUNCATED", "resume", "can't be loaded"),
    ("--resume FOREIGN", "resume", "not a checkpoint of"),
    ("--resume SISTER", "resume", "not a checkpoint of"),
    ("--resume OLDER", "resume", "another version"),
    ("--resume FOLDER", "resume", ""),
    ("--resume EARLIER --max_steps 90", "resume", "later"),
    ("--resume CHECKPOINT", "max_steps", "30"),
    ("--resume CHECKPOINT --max_steps 90 --adv_estimator group_norm", "adv_estimator", "logistic"),
    ("--resume CHECKPOINT --max_steps 90 --seed 1", "seed", "42"),
    ("--resume CHECKPOINT --max_steps 90 --group_size 8", "group_size", "4"),
    ("--resume CHECKPOINT --max_steps 90 --target world", "target", "hello"),
    ("--resume CHECKPOINT --max_steps 90 --temperature 1", "temperature", "auto"),
    ("--resume CHECKPOINT --max_steps 90 --offline DATA", "offline", "None"),
    ("--resume CHECKPOINT --max_steps 90 --save_trajectories NEW", "save_trajectories", "not with"),
    ("--resume CHECKPOINT --max_steps 90 --hidden_size 32", "hidden_size", "64"),
    ("--infer CHECKPOINT --resume CHECKPOINT", "infer", ""),
    ("--infer CHECKPOINT --target world", "target", "hello"),
    ("--infer CHECKPOINT --max_steps 3", "max_steps", "30"),
    ("--infer MISSING", "infer", ""),
    ("--infer OLDER", "infer", "another version"),
]


@pytest.fixture(scope="session")
def files(checkpoint, data, tmp_path_factory) -> dict[str, Path]:
    """Files that can't be used, and others, under the names that they have in BAD."""
    bad = tmp_path_factory.mktemp("bad")
    found = bad_files(te, checkpoint, bad, missing="hidden_size")
    arrays = dict(np.load(data))
    changes = {
        "RAGGED": {"rewards": arrays["rewards"][:-1]},
        "LONGER": {"target": "hellooo"},
        "LACKING": {"logp_old": None},
    }
    for name, change in changes.items():
        found[name] = bad / f"{name.lower()}.npz"
        np.savez(found[name], **{k: v for k, v in (arrays | change).items() if v is not None})
    return found | {
        "EARLIER": checkpoint.with_name("checkpoint-000008.pt"),
        "DATA": data,
        "NEW": bad / "new.npz",
        "NOWHERE": bad / "no" / "where.npz",
        "EMPTY": Path(),
    }


@pytest.mark.parametrize("line,flag,text", BAD, ids=[line for line, *_ in BAD])
def test_bad_input(line, flag, text, tmp_path, capsys, files):
    flags = ["" if word == "EMPTY" else str(files.get(word, word)) for word in line.split()]
    untouched = [files[name].parent for name in ("MISSING", "CHECKPOINT", "DATA")]
    error = check_refused(te, flags, tmp_path, capsys, untouched)
    assert error.startswith(f"argument --{flag}") and text in error


def test_the_message_of_sizes_is_true():
    assert te.divisors(6) == "what does: 2, 3, 6" and te.divisors(1) == "nothing does"
    assert te.divisors(7) == "what does: 7"


@pytest.mark.parametrize("how", ["resume", "infer"])
def test_offline_checkpoint_without_its_file(how, tmp_path, data):
    """--infer needs no texts; --resume does, and should say so (exit 2), not end in a traceback."""
    path = tmp_path / "texts.npz"
    shutil.copy(data, path)
    assert te.main(short(tmp_path, "a", "--offline", str(path), "--max_steps", "3")) == 0
    path.unlink()
    last = str(tmp_path / te.SCRIPT / "a" / "checkpoint-last.pt")
    if how == "infer":
        assert te.main(["--infer", last]) == 0
        return
    with pytest.raises(SystemExit) as stopped:
        te.main(["--resume", last, "--max_steps", "5", "--quiet"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("change", ["too large", "negative", "float"])
def test_offline_actions_outside_the_alphabet(change, tmp_path, data):
    arrays, path = dict(np.load(data)), tmp_path / "bad.npz"
    actions = arrays["actions"]
    arrays["actions"] = {
        "too large": actions + 26,
        "negative": actions - 26,
        "float": actions + 0.0,
    }[change]
    np.savez(path, **arrays)
    with pytest.raises(SystemExit) as stopped:
        te.main(short(tmp_path, "a", "--offline", str(path), "--max_steps", "3"))
    assert stopped.value.code == 2


def test_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    check_unwritable(te, short(tmp_path / "file", "a"), capsys)


@pytest.mark.parametrize("flags", MANY)
def test_nothing_is_created_on_the_wrong_device(flags, tmp_path, data):
    """Tensors made without a device would land on the default one, here the shapeless `meta`."""
    more = ["--offline", str(data)] if not flags else []
    trainer = te.Trainer(te.parse_args(short(tmp_path, "a", "--device", "cpu", *flags, *more)))
    trainer.update()  # Adam makes its state at the first step
    with torch.device("meta"):
        row = trainer.update()
        result = te.evaluate(trainer.log_probs(), trainer.target)
        texts = trainer.texts()
    assert all(math.isfinite(v) for v in [*result.values(), *row.values()])
    assert all(len(text) == 5 for text in texts.values())


@pytest.mark.cuda
@pytest.mark.parametrize("flags", MANY)
def test_cuda(flags, tmp_path):
    path = str(tmp_path / "texts.npz")
    more = ["--device", "cuda", *flags]
    assert te.main(short(tmp_path, "a", *more, "--save_trajectories", path)) == 0
    folder = tmp_path / te.SCRIPT / "a"
    assert state(folder)["counters"] == (30, 2400)
    assert te.main(short(tmp_path, "b", *more, "--offline", path)) == 0
    last = str(folder / "checkpoint-last.pt")
    assert te.main(["--infer", last]) == 0 and te.main(["--infer", last, "--device", "cpu"]) == 0
    assert te.main(["--resume", last, "--max_steps", "40", "--device", "cpu", "--quiet"]) == 0


# ---- 8  learning ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--language", "code"], ["--target", LONG]], ids=" ".join)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_default_run_solves(estimator, flags, tmp_path):
    more = ["--seed", "1", "--output_dir", str(tmp_path), "--adv_estimator", estimator]
    result = te.train(make_args(*more, *flags))
    assert result["solved"] and result["step"] <= (400 if LONG in flags else 120)
    assert result["greedy"] == {"code": "12345", LONG: LONG}.get(
        flags[-1] if flags else "", "hello"
    )


@pytest.mark.slow
def test_chinese(tmp_path):
    flags = ["--language", "chinese", "--num_trajectories", "256", "--output_dir", str(tmp_path)]
    result = te.train(make_args(*flags))
    assert result["solved"] and result["greedy"] == "你好世界" and result["step"] <= 300


@pytest.mark.slow
def test_the_articles_observation_does_not_learn(tmp_path):
    """step / len: neighbouring positions look alike to the network."""
    flags = ["--seed", "1", "--max_steps", "300", "--output_dir", str(tmp_path)]
    result = te.train(make_args("--observation", "scalar", *flags))
    assert not result["solved"] and result["greedy"] != "hello" and result["step"] == 300
