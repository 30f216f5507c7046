"""docs/errata.md, shown: the faulty form runs beside ours. A test's name carries the number."""

import itertools
import math
import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from torch import nn

import cartpole_grpo as cg
import cartpole_pg_family as cp
import frozen_lake_ppo_grpo as fl
import text_env_pairwise_grpo as te
import tiny_gpt_rlhf as gpt

CPU = torch.device("cpu")


def gae_by_the_article(rewards, values, gamma=0.9, lam=0.95):
    """One trajectory with an action-less row for the terminal state, next value 0 after it."""
    advantages, following = [], 0.0
    next_values = [*values[1:], 0.0]
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * next_values[t] - values[t] + gamma * lam * following
        advantages.insert(0, following)
    return torch.tensor(advantages)


def our_gae(rewards, values, terminated, final_value=0.0, gamma=0.9, lam=0.95):
    """One episode of actions; the observation after the last one is worth final_value."""
    rewards, values = torch.tensor([rewards]), torch.tensor([values])
    next_values = torch.cat([values[:, 1:], torch.tensor([[final_value]])], dim=1)
    end = torch.zeros_like(rewards, dtype=torch.bool)
    end[0, -1] = True
    never = torch.zeros_like(end)
    flags = (end, never) if terminated else (never, end)
    return fl.compute_gae(rewards, values, next_values, *flags, gamma, lam)[0]


def test_erratum_1_maps_ignore_the_seed():
    def faulty():
        random.seed(42)
        np.random.seed(42)
        torch.manual_seed(42)
        return [generate_random_map(8) for _ in range(3)]  # has a generator of its own

    assert faulty() != faulty()
    ours = [fl.draw_maps(np.random.default_rng(42), 3, 8, held_out=False) for _ in range(2)]
    assert ours[0] == ours[1]


def test_erratum_2_the_reward_is_discounted_once_too_often():
    """Three steps to the goal, a perfect critic (V(goal) = 1 in the article's form)."""
    values = [0.729, 0.81, 0.9, 1.0]  # the terminal state is a row
    faulty = gae_by_the_article([0.0, 0.0, 0.0, 1.0], values) + torch.tensor(values)
    assert faulty[2].item() == pytest.approx(0.9)  # the last action's return
    values = [0.81, 0.9, 1.0]
    ours = our_gae([0.0, 0.0, 1.0], values, terminated=True) + torch.tensor(values)
    assert ours.tolist() == pytest.approx([0.81, 0.9, 1.0])
    # and with V = 0: the last action's advantage is gamma * lam, not 1
    assert gae_by_the_article([0.0, 1.0], [0.0, 0.0])[0].item() == pytest.approx(0.855)
    assert our_gae([1.0], [0.0], terminated=True).item() == pytest.approx(1.0)


def test_erratum_3_whitening_each_trajectory_makes_a_fall_as_good_as_a_success():
    whiten_one = lambda x: (x - x.mean()) / (x.std() + 1e-8)  # noqa: E731
    for start, hole, sign in ((0.30, 0.05, -1), (0.05, 0.30, 1), (0.10, 0.12, 1)):
        faulty = whiten_one(gae_by_the_article([0.0, 0.0], [start, hole]))
        assert faulty[0].item() == pytest.approx(sign * 0.5**0.5, abs=1e-4)  # the critic's noise

    # untrained critics: the step into a hole is praised or blamed by the luck of their weights
    shares = []
    for seed in range(10):
        flags = ["--gamma", "0.9", "--eval_maps", "1", "--seed", str(seed)]
        trainer = fl.Trainer(fl.parse_args(flags))
        lakes = trainer.make_lakes(trainer.rng, 32, held_out=False)
        policy = fl.evaluate_cells(trainer.actor, lakes).log_softmax(dim=1)
        batch = fl.sample_batch(policy, lakes, lakes.start, 8, 100, trainer.generator)
        with torch.no_grad():  # the article's critic judges holes, too
            value = trainer.critic(fl.observe(lakes, torch.arange(lakes.live.numel()))).squeeze(1)
        praised = []
        for e in (batch.rewards.sum(dim=1) == 0).nonzero().flatten():
            cells = batch.cells[e, batch.mask[e]].tolist()
            if not batch.truncated[e].any():
                states = [*cells, int(batch.next_cells[e, len(cells) - 1])]
                raw = gae_by_the_article([0.0] * len(states), value[states].tolist())
                praised.append(bool(whiten_one(raw)[len(cells) - 1] > 0))
        shares.append(sum(praised) / len(praised))

        ours, _ = fl.prepare_ppo(
            batch, fl.evaluate_cells(trainer.critic, lakes).squeeze(1), trainer.args
        )
        goal = batch.rewards == 1
        fall = batch.terminated & ~goal
        assert ours[goal].min() > 1  # always praised, and far more than any fall
        assert ours[goal].min() > ours[fall].max()
    assert min(shares) < 0.2 and max(shares) > 0.8, shares


def test_erratum_4_with_one_update_a_batch_the_clip_never_acts():
    flags = ["--adv_estimator", "grpo", "--actor_learning_rate", "3e-3", "--no-anneal"]
    flags += ["--eval_maps", "1", "--num_updates_per_batch"]
    one, four = (fl.Trainer(fl.parse_args([*flags, passes])) for passes in ("1", "4"))
    assert all(one.update()["losses/clipfrac"] == 0 for _ in range(8))
    assert one.update()["losses/approx_kl"] == pytest.approx(0, abs=1e-8)
    assert max(four.update()["losses/clipfrac"] for _ in range(8)) > 0


def test_erratum_4_beyond_the_clip_a_negative_advantage_still_has_its_gradient():
    """The article: a policy that moved far gets no large gradient. At rho 3 and A -1 it is 3."""
    logp = torch.tensor(3.0).log().requires_grad_()
    (-fl.clipped_surrogate(logp.exp(), torch.tensor(-1.0), 0.2, 0.2)).backward()
    assert logp.grad.item() == pytest.approx(3.0)


def test_erratum_5_running_out_of_time_is_not_death():
    values, final = [0.5, 0.5], 0.5  # the critic says: still alive, half the way
    faulty = gae_by_the_article([0.0, 0.0, 0.0], [*values, final]) + torch.tensor([*values, final])
    assert faulty[-1].item() == pytest.approx(0.0)  # the target of the last cell
    returns = our_gae([0.0, 0.0], values, terminated=False, final_value=final)
    assert (returns + torch.tensor(values))[-1].item() == pytest.approx(0.9 * final)
    # an 8x8 `desc` has the limit of 4x4 unless one says otherwise
    env = gym.make("FrozenLake-v1", desc=generate_random_map(8, seed=0))
    assert env.spec.max_episode_steps == 100
    assert fl.parse_args(["--frozen_lake_size", "8"]).max_episode_steps == 200
    assert fl.parse_args([]).max_episode_steps == 100


def test_erratum_6_sizes_2_and_3_crash_inside_the_network(capsys):
    faulty = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.MaxPool2d(2), nn.MaxPool2d(2))
    for size in (2, 3):
        with pytest.raises(RuntimeError):
            faulty(torch.zeros(1, 2, size, size))
        with pytest.raises(SystemExit) as stopped:
            fl.parse_args(["--frozen_lake_size", str(size)])
        assert stopped.value.code == 2 and "--frozen_lake_size" in capsys.readouterr().err


@pytest.mark.parametrize("estimator", ["ppo", "grpo"])
def test_erratum_6_flags_reach_where_they_act(estimator, tmp_path):
    """save_steps and slippery for both estimators; the last update is saved, multiple or not."""
    flags = ["--adv_estimator", estimator, "--frozen_lake_slippery", "--save_steps", "2"]
    flags += ["--max_steps", "5", "--batch_size", "2", "--eval_maps", "2", "--quiet"]
    args = fl.parse_args([*flags, "--output_dir", str(tmp_path)])
    folder = fl.train(args)["run_dir"]
    saved = {
        step: fl.load_checkpoint(f"{folder}/checkpoint-{step}.pt") for step in ("000002", "last")
    }
    assert saved["000002"]["counters"][0] == 2
    assert saved["last"]["counters"][0] == 5
    assert fl.Trainer(args).eval_lakes.prob.shape[-1] == 3  # three outcomes on slippery ice
    assert saved["last"]["config"]["entropy_coef"] == args.entropy_coef == 0.0  # one default each


def test_erratum_7_the_std_of_one_member_is_nan(capsys):
    assert torch.tensor([3.0]).std().isnan()  # the printed code normalises [[r]]
    with pytest.raises(SystemExit) as stopped:
        cg.parse_args(["--group_size", "1"])
    assert stopped.value.code == 2 and "--group_size" in capsys.readouterr().err


def test_erratum_8_one_reward_for_all_is_no_comparison():
    rewards = torch.full((1, 8), 0.3)  # as printed: the executed action's, eight times
    assert torch.equal(cg.compute_grpo(rewards), torch.zeros(1, 8))
    # and at p = 1/2 nearly half of the credited actions are not the executed one
    drawn = torch.randint(2, (100_000, 8), generator=torch.Generator().manual_seed(0))
    assert (drawn != drawn[:, :1]).float().mean().item() == pytest.approx(7 / 16, abs=0.005)
    # here every member of the group is executed: where it goes shows its own first action
    trainer = cg.Trainer(cg.parse_args(["--horizon", "1", "--quiet"]))
    cg.visit(trainer)
    batch = cg.sample_batch(trainer)
    speed = torch.as_tensor(np.asarray(trainer.branches.state)[1]).view_as(batch.actions)
    pushed = speed > batch.observations[:, 1:2]
    assert torch.equal(pushed[batch.mask], (batch.actions == 1)[batch.mask])


def test_erratum_9_one_step_cannot_tell_the_actions_apart():
    rng, count = np.random.default_rng(0), 500
    envs = cg.make_envs("CartPole-v1", count)
    envs.reset(seed=0)
    state = rng.uniform(-1, 1, (4, count)) * np.array([[2.0], [1.0], [0.18], [1.0]])

    def rewards(action, steps):
        envs.state, envs.prev_done = state.copy(), np.zeros(count, dtype=bool)
        for _ in range(steps):
            envs.step(np.full(count, action))
        x, _, theta, _ = np.asarray(envs.state)
        return cg.shaped_reward(x, theta, envs.x_threshold, envs.theta_threshold_radians)

    assert np.abs(rewards(0, 1) - rewards(1, 1)).max() == 0
    envs.prev_done[:] = False
    assert np.abs(rewards(0, 2) - rewards(1, 2)).mean() > 0.01
    for reward in ("survival", "shaped"):
        trainer = cg.Trainer(cg.parse_args(["--horizon", "1", "--reward", reward, "--quiet"]))
        before = [p.clone() for p in trainer.actor.parameters()]
        for _ in range(3):
            trainer.update()
        assert trainer.groups == trainer.flat > 0
        assert all(map(torch.equal, before, trainer.actor.parameters()))


def test_erratum_10_the_limit_is_kept():
    env = gym.make("CartPole-v1").unwrapped  # as printed
    state, _ = env.reset(seed=0)
    weights = np.array([0.05, 0.1, 1.0, 0.5])  # a fair controller
    for _ in range(600):
        state, _, terminated, truncated, _ = env.step(int(state @ weights > 0))
        assert not truncated and not terminated
    trainer = cg.Trainer(cg.parse_args(["--horizon", "20", "--num_states", "2", "--quiet"]))
    cg.visit(trainer)
    trainer.envs.steps[:] = 495  # five steps are left, in the branches too
    batch = cg.sample_batch(trainer)
    assert batch.rewards.shape[2] == 5 and batch.rewards.sum(dim=2).max() == 5


def test_erratum_10_equal_rewards_are_no_signal():
    rewards = torch.full((1, 8), 0.7)
    faulty = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    assert faulty.min().item() == pytest.approx(0.81, abs=0.01)  # of rounding
    assert torch.equal(cg.compute_grpo(rewards), torch.zeros(1, 8))


def test_erratum_11_with_gamma_09_the_return_cannot_tell_50_steps_from_200():
    rewards = torch.zeros(2, 200, dtype=torch.float64)
    rewards[0, :50], rewards[1] = 1, 1
    short, long = cp.compute_vanilla(rewards, 0.9)[:, 0].tolist()
    assert long / short - 1 == pytest.approx(0.005, abs=5e-4)
    short, long = cp.compute_vanilla(rewards, cp.parse_args(["--adv_estimator=vanilla"]).gamma)[
        :, 0
    ].tolist()
    assert (short, long) == (50, 200)


def two_step_gradient(phi, logits=(0.3, 0.5), episodes=1):
    """Exact E[sum_t grad log pi(a_t) Phi_t] / episodes over all outcomes of two-step episodes.

    Action 1 has probability sigmoid(logit) and is rewarded by 1 in step one, by -1.5 in step two.
    """
    theta = torch.tensor(logits, dtype=torch.float64)
    up = theta.sigmoid()
    total = torch.zeros(2, dtype=torch.float64)
    for choice in itertools.product([0.0, 1.0], repeat=2 * episodes):
        actions = torch.tensor(choice, dtype=torch.float64).view(episodes, 2)
        chance = torch.where(actions == 1, up, 1 - up).prod()
        rewards = actions * torch.tensor([1.0, -1.5], dtype=torch.float64)
        total += chance * ((actions - up) * phi(rewards)).sum(dim=0)  # grad log pi = a - sigmoid
    return total / episodes


def test_erratum_12_the_trajectory_mean_is_a_biased_baseline():
    def with_baseline(kind):
        def phi(rewards):
            returns = cp.compute_reinforce(rewards, 1.0)
            value = torch.tensor([[7.0, -3.0]], dtype=torch.float64)  # any function of the state
            mask = torch.ones_like(rewards, dtype=torch.bool)
            return cp.compute_baseline(returns, value.expand_as(returns), mask, kind)

        return phi

    theta = torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True)
    (theta.sigmoid() * torch.tensor([1.0, -1.5])).sum().backward()  # J, exactly
    assert theta.grad.tolist() == pytest.approx([0.2445, -0.3525], abs=1e-4)
    for unbiased in (lambda r: cp.compute_reinforce(r, 1.0), with_baseline("value")):
        torch.testing.assert_close(two_step_gradient(unbiased), theta.grad)
    biased = two_step_gradient(with_baseline("trajectory_mean"))
    assert biased.tolist() == pytest.approx([0.1222, 0.0], abs=1e-4)
    # the mean over the batch at each t: each of n episodes is in its own mean, (n - 1) / n is left
    for n in (2, 3):
        found = two_step_gradient(with_baseline("batch_time_mean"), episodes=n)
        torch.testing.assert_close(found, theta.grad * (n - 1) / n)

    # a perfect episode: the notes' baseline punishes its last step
    returns = cp.compute_reinforce(torch.ones(1, 200, dtype=torch.float64), 0.9)
    mask = torch.ones_like(returns, dtype=torch.bool)
    last = cp.compute_baseline(returns, returns, mask, "trajectory_mean")[0, -1]
    assert last.item() == pytest.approx(-8.55, abs=0.01)


def test_erratum_13_v_is_not_the_baseline_of_least_variance():
    p, q = torch.tensor([0.9, 0.1]), torch.tensor([1.0, 0.0])
    score = torch.eye(2) - p  # (a, logit): grad log pi(a)

    def variance(baseline):
        mask = torch.ones(2, 1, dtype=torch.bool)
        b = torch.full((2, 1), baseline)
        phi = cp.compute_baseline(q[:, None], b, mask, "value")  # (a, 1)
        mean = (p[:, None] * score * phi).sum(dim=0)
        assert mean.tolist() == pytest.approx([0.09, -0.09])  # no baseline moves the mean
        return (p[:, None] * (score * phi - mean).square()).sum().item()

    square = score.square().sum(dim=1)
    best = ((p * square * q).sum() / (p * square).sum()).item()
    assert best == pytest.approx(0.1)
    value = (p * q).sum().item()
    assert variance(value) == pytest.approx(0.1152, abs=1e-4)
    assert variance(0.0) == pytest.approx(0.0018, abs=1e-4)
    assert variance(best) == pytest.approx(0, abs=1e-7)


def test_erratum_14_gae_needs_the_end_of_an_episode():
    rewards, values = torch.ones(1, 2), torch.full((1, 2), 5.0)
    next_values = torch.full((1, 2), 5.0)
    never, fell = torch.zeros(1, 2, dtype=torch.bool), torch.tensor([[False, True]])
    faulty = rewards + 0.9 * next_values - values  # the snippet: no (1 - done)
    assert faulty[0, 1].item() == pytest.approx(0.5)
    ours = cp.compute_gae(rewards, values, next_values, fell, never, 0.9, 0.95)
    assert ours[0, 1].item() == pytest.approx(-4)


def test_erratum_14_the_time_limit_is_not_done():
    """Step 500, V = 10 everywhere: the notes' PPO teaches the critic 1; it is 1 + 0.9 * 10."""
    args = cp.parse_args(["--gamma", "0.9"])
    shape = torch.zeros(1, 1, dtype=torch.bool)
    batch = cp.Batch(
        torch.zeros(1, 2, 4), torch.zeros(1, 1).long(), torch.zeros(1, 1), torch.ones(1, 1),
        terminated=shape, truncated=~shape, mask=~shape,
    )  # fmt: skip
    _, returns = cp.prepare_inputs(args, batch, torch.full((1, 2), 10.0))
    assert returns.item() == pytest.approx(10)
    batch.terminated, batch.truncated = batch.truncated, batch.terminated
    _, returns = cp.prepare_inputs(args, batch, torch.full((1, 2), 10.0))
    assert returns.item() == pytest.approx(1)


def test_erratum_14_a_column_against_a_row_is_refused():
    ratio, advantages = torch.ones(3), torch.ones(3, 1)
    assert (ratio * advantages).shape == (3, 3)  # the classic silent fault
    with pytest.raises(AssertionError):
        cp.clipped_surrogate(ratio, advantages, 0.2, 0.2)
    with pytest.raises(AssertionError):
        cp.value_loss(ratio, advantages)


def tiny_gpt(vocabulary: gpt.Vocabulary) -> gpt.GPT:
    args = gpt.parse_args(["--width", "16", "--layers", "1", "--heads", "2"])
    return gpt.GPT(args, len(vocabulary))


def test_erratum_15_padding_as_the_stop_token_never_trains_stopping():
    """The collator's labels have -100 at the padding token, which is the stop token there."""
    vocabulary = gpt.Vocabulary("好差：")
    rows = [gpt.Review("好", True, "好"), gpt.Review("差", False, "差差差")]
    ids = gpt.pack([vocabulary.encode(row) for row in rows], CPU)
    log_probs = gpt.policy_dist(tiny_gpt(vocabulary)(ids[:, :-1])).clamp(min=-1e4)
    log_probs.retain_grad()
    faulty = ids[:, 1:].masked_fill((ids[:, 1:] == gpt.PAD) | (ids[:, 1:] == gpt.EOS), -100)
    torch.nn.functional.nll_loss(log_probs.flatten(0, 1), faulty.flatten()).backward()
    assert (log_probs.grad[..., gpt.EOS] == 0).all()  # nothing makes <eos> more likely

    log_probs = gpt.policy_dist(tiny_gpt(vocabulary)(ids[:, :-1])).clamp(min=-1e4)
    log_probs.retain_grad()
    logp = log_probs.gather(2, ids[:, 1:, None]).squeeze(2)
    (-logp[ids[:, 1:] != gpt.PAD].mean()).backward()  # the loss of update_sft
    assert (log_probs.grad[..., gpt.EOS] < 0).sum() == 2  # once in each review


def test_erratum_15_labels_are_not_a_ranking():
    """Scores that a label loss is content with, and that rank a pair wrong."""
    scores, labels = torch.tensor([9.0, 4.0, -4.0, -9.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert torch.nn.functional.binary_cross_entropy_with_logits(scores, labels) < 0.01
    better, worse = scores[1:2], scores[:1]  # both positive, the second review is the better one
    assert gpt.bradley_terry_loss(better, worse) > 5


def test_erratum_15_texts_longer_than_the_context_are_skipped(tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("cat,label,review\n书,1," + "好" * 43 + "\n书,0," + "差" * 45 + "\n", "utf-8")
    reviews, skipped = gpt.load_csv(str(path), 48)
    assert [len(row.text) for row in reviews] == [43] and skipped == {"too long": 1}
    vocabulary = gpt.Vocabulary("书好：")
    assert len(vocabulary.encode(reviews[0])) == 47 <= 48


def printed_loss(returns: list[float], log_weights: torch.Tensor, temperature: float):
    """The article's double loop over ordered pairs of one group."""
    size, total = len(returns), 0.0
    for i in range(size):
        for j in range(size):
            if i != j:
                difference = torch.tensor(
                    (returns[i] - returns[j]) / temperature, dtype=torch.float64
                )
                preferred = torch.nn.functional.logsigmoid(difference)
                total = total - preferred * (log_weights[i] - log_weights[j])
    return total / (size * (size - 1))


@pytest.mark.parametrize("size, temperature", [(4, 0.01), (4, 0.2), (8, 0.1), (16, 1.0)])
def test_erratum_16_the_printed_pairwise_loss_is_linear(size, temperature):
    """No sigmoid is left: REINFORCE with the mean of the others as baseline, over T."""
    torch.manual_seed(size)
    scores = torch.randn(size, dtype=torch.float64) * 2
    weights = torch.randn(size, dtype=torch.float64, requires_grad=True)
    faulty = printed_loss(scores.tolist(), weights, temperature)
    t = torch.full((1,), temperature, dtype=torch.float64)
    ours = te.pairwise_linear(weights, scores, t)
    others = (scores.sum() - scores) / (size - 1)
    reinforce = -((scores - others) / temperature * weights).mean()
    logistic = te.pairwise_logistic(weights, scores, t)
    (expected,) = torch.autograd.grad(reinforce, weights)
    for loss in (faulty, ours):
        assert loss.item() == pytest.approx(reinforce.item(), rel=1e-10)
        (gradient,) = torch.autograd.grad(loss, weights)
        assert torch.allclose(gradient, expected, rtol=1e-10, atol=0)
    (gradient,) = torch.autograd.grad(logistic, weights)
    assert not torch.allclose(gradient, expected, rtol=1e-3)


def test_erratum_17_the_printed_loss_is_not_scale_free():
    """Returns x10 give a gradient x10; the logistic form is bounded, the group's std cancels it."""
    scores, t = torch.tensor([5.0, 1.7, 0.6, -0.5], dtype=torch.float64), torch.full((1,), 0.2)
    weights = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def norm(form, scale: float) -> float:
        (gradient,) = torch.autograd.grad(form(weights, scores * scale, t.double()), weights)
        return gradient.norm().item()

    assert norm(te.pairwise_linear, 10) == pytest.approx(10 * norm(te.pairwise_linear, 1))
    assert norm(te.pairwise_logistic, 1000) < 1.01 * norm(te.pairwise_logistic, 10) < 0.5
    one, ten = te.compute_grpo(scores[None]), te.compute_grpo(10 * scores[None])
    assert torch.allclose(one, ten, rtol=1e-3)


def test_erratum_18_the_printed_kl_is_taken_before_the_step():
    """There it is 0, whatever the step; after it k1 can be negative, k3 can't."""
    args = te.parse_args(["--adv_estimator", "pairwise_linear", "--quiet", "--eval_every", "0"])
    trainer, found = te.Trainer(args), []
    for _ in range(40):
        before = trainer.log_probs()
        metrics = trainer.update()
        batch = trainer.last
        printed = (batch.logp_old - te.at_actions(before, batch.actions)).mean()
        assert abs(printed.item()) < 1e-6
        logp = te.at_actions(trainer.log_probs(), batch.actions)
        assert metrics["losses/approx_kl_k1"] == (batch.logp_old - logp).mean().item()
        found.append((metrics["losses/approx_kl_k1"], metrics["losses/approx_kl"]))
    assert min(k1 for k1, _ in found) < 0 < min(k3 for _, k3 in found)


@pytest.mark.parametrize("top", [0.06, 0.1, 0.25])
def test_erratum_19_entropy_over_sampled_actions_points_down(top):
    """-p log p of the sampled action: its expected gradient lowers the entropy of flat policies."""
    p = torch.full((26,), (1 - top) / 25, dtype=torch.float64)
    p[0] = top
    logits = p.log().requires_grad_()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    log_probs = logits.log_softmax(dim=0)
    sampled = (p * -(log_probs.exp() * log_probs)).sum()  # its expectation over actions from p
    true = te.categorical_entropy(log_probs)
    down, up = gradient(sampled), gradient(te.categorical_entropy(logits.log_softmax(dim=0)))
    assert torch.cosine_similarity(down, up, dim=0).item() == pytest.approx(-1, abs=1e-3)
    assert sampled.item() < 1 / math.e < true.item()
    moved = te.categorical_entropy((logits + 0.01 * down).log_softmax(dim=0))
    assert moved < true < te.categorical_entropy((logits + 0.01 * up).log_softmax(dim=0))


def test_erratum_20_the_printed_log_is_impossible():
    """Averages of 8 texts of 5 characters, and entropies, that the printed code cannot print."""
    averages = {round(5 - 1.1 * wrong / 8, 4) for wrong in range(41)}
    assert all(min(abs(x - a) for a in averages) > 0.01 for x in (-0.40, 2.60, 4.20, 4.85))
    best = {round(5 - 1.1 * wrong, 4) for wrong in range(6)}
    assert 2.0 not in best and 3.0 not in best
    p = torch.linspace(1e-6, 1, 10**6, dtype=torch.float64)
    assert (-p * p.log()).max().item() < 0.368 < 1.023  # the least entropy printed


def test_erratum_20_a_target_outside_the_alphabet_is_refused(capsys):
    """With digits 'hello' cannot be had: the highest return is -0.5."""
    env = te.MultilingualTextEnv("12345", te.CHARSETS["code"][1])
    env.reset()
    assert sum(env.step(9)[1] for _ in range(5)) == pytest.approx(-0.5)  # nothing right
    with pytest.raises(ValueError, match="'helo' of 'hello'"):
        te.MultilingualTextEnv("hello", te.CHARSETS["code"][1])
    with pytest.raises(SystemExit) as stop:
        te.parse_args(["--target", "hello", "--language", "code"])
    assert stop.value.code == 2 and "--target" in capsys.readouterr().err
