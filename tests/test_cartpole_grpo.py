"""cartpole_grpo.py: branches beside gymnasium, formulas in loops, horizon, runs, learning."""

import argparse
import copy
import json
import math
import signal
import statistics
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy import stats

import cartpole_grpo as cg
from conftest import (
    bad_files,
    break_with_nan,
    check_full_disk,
    check_kill_while_saving,
    check_refused,
    check_resume,
    check_second_interrupt,
    check_unwritable,
    close,
    events_of,
    interrupt_at,
    interrupt_first_evaluation,
    metrics,
    same,
    state,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*CartPole-v0 is out of date")

CPU = torch.device("cpu")
ESTIMATORS = ["grpo", "rloo", "none"]


def make_args(*flags: str) -> argparse.Namespace:
    return cg.parse_args(["--threads", "1", *flags, "--quiet"])


def make_trainer(*flags: str) -> cg.Trainer:
    return cg.Trainer(make_args("--eval_episodes", "2", *flags))


def weights(trainer: cg.Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.actor.parameters()])


def controller(observations: torch.Tensor, gain=1e3) -> torch.Tensor:
    """Logits that push to where the pole falls: it stays up for hundreds of steps."""
    lean = gain * (observations[..., 2] + observations[..., 3])
    return torch.stack([-lean, lean], dim=-1)


def place(trainer: cg.Trainer, states, steps=0) -> None:
    """Put the visited environments at these states (S, 4), at this step of their episodes."""
    trainer.envs.state = np.array(states, dtype=np.float64).T.copy()
    trainer.envs.steps[:] = steps
    trainer.observation = trainer.envs.state.T.astype(np.float32)
    trainer.ended[:] = trainer.envs.prev_done[:] = False


def spy_draw(monkeypatch, first=None) -> list[np.ndarray]:
    """A list that gets all that cg.draw returns; first: what it returns at the first call."""
    seen, real = [], cg.draw

    def draw(logits, generator):
        action = real(logits, generator)
        if first is not None and not seen:
            action = torch.tensor(first)
        seen.append(action.numpy().copy())
        return action

    monkeypatch.setattr(cg, "draw", draw)
    return seen


def loop_shaped(x: float, theta: float) -> float:
    return (2.4 - abs(x)) / 2.4 - 0.8 + (math.radians(12) - abs(theta)) / math.radians(12) - 0.5


def follow(start, actions, steps: int, limit: int, shaped=False) -> tuple[list, bool, np.ndarray]:
    """Rewards of a branch in gymnasium's own environment, whether it fell, where it got to."""
    env = gym.make("CartPole-v1").unwrapped
    env.reset()
    env.state, rewards, fell = tuple(start), [], False
    for action in actions:
        observation, reward, fell, _, _ = env.step(int(action))
        steps += 1
        rewards.append(loop_shaped(env.state[0], env.state[2]) if shaped else reward)
        if fell or steps >= limit:
            break
    return rewards, fell, observation


# ---- 1  branches ---------------------------------------------------------------------------------

FALLING = [0.0, 0.3, 0.2, 0.9]  # leans, and falls in one or two steps
BRANCHES = [
    ("CartPole-v1", 0, [0.01, -0.2, 0.03, 0.4], 30, "survival"),
    ("CartPole-v1", 0, [0.01, -0.2, 0.03, 0.4], 12, "shaped"),
    ("CartPole-v1", 494, [0.0, 0.0, 0.0, 0.0], 30, "survival"),  # the limit ends it after 6
    ("CartPole-v0", 194, [0.0, 0.0, 0.0, 0.0], 30, "survival"),
    ("CartPole-v0", 199, [0.0, 0.0, 0.0, 0.0], 30, "shaped"),
    ("CartPole-v1", 300, FALLING, 30, "survival"),
    ("CartPole-v1", 300, [0.0, 0.3, 0.17, 0.9], 30, "shaped"),
    ("CartPole-v1", 300, [-2.35, -1.5, 0.0, 0.0], 30, "survival"),  # leaves the track
]


@pytest.mark.parametrize("env_id,steps,start,horizon,reward", BRANCHES)
def test_branches_are_gymnasiums(env_id, steps, start, horizon, reward, monkeypatch):
    """Both first actions from each of two states, step by step, in gymnasium's environment."""
    flags = ["--env_id", env_id, "--horizon", str(horizon), "--reward", reward]
    trainer = make_trainer(*flags, "--num_states", "2", "--group_size", "4")
    other = [0.02, 0.1, -0.05, -0.2]
    place(trainer, [start, other], steps)
    seen = spy_draw(monkeypatch, [0, 1, 1, 0, 1, 0, 0, 1])
    observed, step = [], trainer.branches.step
    trainer.branches.step = lambda a: observed.append(step(a)) or observed[-1]
    batch = cg.sample_batch(trainer)
    assert batch.actions.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
    close(batch.observations, torch.tensor([start, other]))
    assert batch.mask.tolist() == [True, True] and batch.rewards.dtype == torch.float32
    limit, lengths = int(env_id[-1]) * 300 + 200, []
    for n in range(8):
        s, g = divmod(n, 4)
        actions = [a[n] for a in seen]
        rewards, fell, last = follow((start, other)[s], actions, steps, limit, reward == "shaped")
        lengths.append(len(rewards))
        row = batch.rewards[s, g].tolist()
        assert row[: len(rewards)] == pytest.approx(rewards, abs=1e-6)
        assert not any(row[len(rewards) :])  # the falling step is paid, then nothing
        end = observed[len(rewards) - 1]
        assert end[0][n] == pytest.approx(last, abs=1e-6) and end[2][n] == fell
        assert end[3][n] == (steps + len(rewards) >= limit)
    assert batch.rewards.shape[2] == len(observed) == max(lengths) <= horizon
    assert trainer.env_steps == sum(lengths)
    if start == FALLING:
        assert max(lengths[:4]) <= 2
    if steps in (194, 199, 494):
        assert max(lengths) == limit - steps
    trainer.branches.step = step


def test_groups_share_their_state_and_differ():
    trainer = make_trainer("--num_states", "6", "--group_size", "3")
    cg.visit(trainer)
    trainer.envs.steps[:] = range(6)
    trainer.branches.prev_done[:] = True
    rows = cg.branch(trainer.envs, trainer.branches, 3)
    assert rows.shape == (18, 4) and rows.dtype == np.float32
    assert trainer.branches.state.shape == (4, 18)
    assert not trainer.branches.prev_done.any()
    for n in range(18):
        assert (rows[n] == trainer.observation[n // 3]).all()
        assert (trainer.branches.state[:, n] == trainer.envs.state[:, n // 3]).all()
        assert trainer.branches.steps[n] == n // 3
    assert len({tuple(row) for row in rows.tolist()}) == 6


def snapshot(envs) -> tuple:
    arrays = envs.state, envs.steps, envs.prev_done
    return [np.array(x).tolist() for x in arrays], copy.deepcopy(envs.np_random.bit_generator.state)


def test_branching_changes_nothing_in_the_visits():
    trainer = make_trainer("--num_states", "8", "--visit_steps", "1")
    plain = make_trainer("--num_states", "8", "--visit_steps", "1")
    ends = 0
    for k in range(80):
        for t in (trainer, plain):  # the same draws, branches or not
            t.generator.manual_seed(k)
            cg.visit(t)
        assert snapshot(trainer.envs) == snapshot(plain.envs)
        before = snapshot(trainer.envs), trainer.observation.tolist(), trainer.ended.tolist()
        running, finished = trainer.running.tolist(), list(trainer.finished)
        batch = cg.sample_batch(trainer)
        assert before == (
            snapshot(trainer.envs),
            trainer.observation.tolist(),
            trainer.ended.tolist(),
        )
        assert (running, finished) == (trainer.running.tolist(), trainer.finished)
        assert batch.mask.tolist() == (~trainer.ended).tolist()
        assert not batch.rewards[~batch.mask].any()
        ends += int(trainer.ended.sum())
    assert ends > 10 and trainer.finished == plain.finished


def test_first_actions_are_the_policys():
    trainer = make_trainer("--num_states", "3", "--group_size", "20000", "--horizon", "1")
    with torch.no_grad():
        trainer.actor[-1].weight.mul_(300)
        trainer.actor[-1].bias.copy_(torch.tensor([0.4, -0.3]))
    place(trainer, [[0.5, 0.5, 0.1, 0.5], [0, 0, 0, 0], [-0.5, -1, -0.1, -1]])
    probs = trainer.actor(torch.tensor(trainer.observation)).softmax(dim=1).detach()
    assert probs[:, 1].max() - probs[:, 1].min() > 0.1
    batch = cg.sample_batch(trainer)
    for s in range(3):
        p = probs[s, 1].item()
        sigma = math.sqrt(p * (1 - p) / 20000)
        assert abs(batch.actions[s].float().mean().item() - p) < 4 * sigma
        close(batch.logp_old[s], probs[s].log()[batch.actions[s]], 1e-6)


def test_an_ended_state_is_in_no_group_and_no_gradient():
    """States 1 and 3 of 4 have ended; whatever is in their rows, the update is the same."""
    results = []
    for junk in (False, True):
        trainer = make_trainer("--num_states", "4", "--adv_estimator", "none")
        states = [[0, 0, 0.15, 1], [0, 0, 0.3, 2], [0, 0, 0.1, 1.5], [0.1, 0, 0, 0]]
        place(trainer, states)
        trainer.ended[[1, 3]] = True
        if junk:
            trainer.observation[[1, 3]] = 7.0
            trainer.envs.state[:, [1, 3]] = [[-1.0, 0], [0, 1], [0, -0.1], [1, 1]]
        rows = []
        trainer.actor.register_forward_pre_hook(lambda _, x, r=rows: r.append(len(x[0])))
        monkey = pytest.MonkeyPatch()
        monkey.setattr(cg, "visit", lambda _: None)
        trainer.args.k_epochs = 1
        trainer.update()
        monkey.undo()
        assert rows[-1] == 16 and trainer.groups == 2  # 2 states, 8 branches
        row = {name: total / number for name, (total, number) in trainer.sums.items()}
        results.append((weights(trainer).tolist(), trainer.env_steps, trainer.flat, row))
    assert results[0] == results[1]


def test_nothing_happens_where_all_have_ended(monkeypatch):
    trainer = make_trainer("--num_states", "3")
    trainer.ended[:] = True
    before = weights(trainer)
    monkeypatch.setattr(cg, "visit", lambda _: None)
    trainer.update()
    assert torch.equal(before, weights(trainer)) and not trainer.sums
    assert (trainer.updates, trainer.groups, trainer.env_steps) == (0, 0, 0)


# ---- 2  returns and advantages -------------------------------------------------------------------


def random_batch(seed=0, num=6, group=4, length=5) -> cg.Batch:
    torch.manual_seed(seed)
    rewards = torch.rand(num, group, length, dtype=torch.float64)
    rewards[1] = rewards[1, 0]  # a flat group
    rewards[4] = rewards[4, 0]
    rewards[2, 1, 2:] = 0.0
    mask = torch.tensor([True, True, True, False, False, True])
    actions = torch.randint(2, (num, group))
    return cg.Batch(torch.randn(num, 4), mask, actions, torch.randn(num, group), rewards)


@pytest.mark.parametrize("gamma", [0.9, 1.0, 0.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_in_loops(estimator, gamma):
    batch = random_batch()
    args = make_args("--adv_estimator", estimator, "--gamma", str(gamma), "--group_size", "4")
    scores, advantages = cg.prepare_inputs(args, batch)
    assert scores.shape == advantages.shape == (6, 4)
    for s in range(6):
        group = [sum(gamma**t * r for t, r in enumerate(b)) for b in batch.rewards[s].tolist()]
        assert scores[s].tolist() == pytest.approx(group, abs=1e-6)
        for g, score in enumerate(group):
            others = group[:g] + group[g + 1 :]
            expected = {
                "grpo": (score - statistics.mean(group)) / (statistics.stdev(group) + 1e-4),
                "rloo": score - statistics.mean(others),
                "none": score,
            }[estimator]
            if s in (1, 4) and estimator != "none":
                assert advantages[s, g].item() == 0.0
            else:
                assert advantages[s, g].item() == pytest.approx(expected, abs=1e-5)
        if estimator == "rloo" and s not in (1, 4):
            scaled = [4 / 3 * (score - statistics.mean(group)) for score in group]
            assert advantages[s].tolist() == pytest.approx(scaled, abs=1e-6)


def test_flat_is_exact():
    """Long equal returns, whose mean and std are not exact, give 0; a hair's difference is not."""
    rewards = torch.full((2, 7, 333), 0.1)
    rewards[1, 3, 300] += 1e-3
    batch = cg.Batch(*[torch.zeros(2, 7)] * 4, rewards)
    for estimator in ("grpo", "rloo"):
        scores, advantages = cg.prepare_inputs(make_args("--adv_estimator", estimator), batch)
        assert cg.flat_groups(scores).tolist() == [True, False]
        assert not advantages[0].any() and advantages[1].all()


def test_shaped_reward_in_a_loop():
    rng = np.random.default_rng(0)
    x, theta = rng.normal(size=50), rng.normal(size=50) / 10
    ours = cg.shaped_reward(x, theta, 2.4, math.radians(12))
    assert ours == pytest.approx([loop_shaped(*pair) for pair in zip(x, theta, strict=True)])
    assert cg.shaped_reward(x[:0] + 1, theta[:0], 2.0, 1.0).shape == (0,)
    assert cg.shaped_reward(np.array([1.0]), np.array([-0.5]), 2.0, 1.0) == pytest.approx(-0.3)


def test_shaped_thresholds_are_the_environments(monkeypatch):
    trainer, real = make_trainer("--reward", "shaped", "--horizon", "3"), cg.shaped_reward
    trainer.branches.x_threshold, trainer.branches.theta_threshold_radians = 3.5, 0.33
    seen = []
    monkeypatch.setattr(cg, "shaped_reward", lambda *a: seen.append(a[2:]) or real(*a))
    cg.sample_batch(trainer)
    assert seen == [(3.5, 0.33)] * 3


# ---- 3  the update -------------------------------------------------------------------------------


def transcription(trainer, batch, advantages, use) -> dict[str, float]:
    """update_model a row at a time, SGD with rate 0.1. Sums of the metrics over steps."""
    args, seen = trainer.args, []
    rows = [(s, g) for s in range(len(use)) if use[s] for g in range(batch.actions.shape[1])]
    generator = torch.Generator()
    generator.set_state(trainer.generator.get_state())
    for _ in range(args.k_epochs):
        order = torch.randperm(len(rows), generator=generator).tolist()
        for first in range(0, len(rows), args.batch_size):
            part = [rows[i] for i in order[first : first + args.batch_size]]
            names = "objective", "entropy", "approx_kl", "clipfrac"
            one: dict = dict.fromkeys(names, 0.0)
            for s, g in part:
                probs = trainer.actor(batch.observations[s][None])[0].softmax(dim=0)
                logp, phi = probs[batch.actions[s, g]].log(), advantages[s, g].item()
                ratio = (logp - batch.logp_old[s, g]).exp()
                low, high = (torch.tensor(1 + e).double() for e in (-0.2, 0.2))
                one["objective"] += min(ratio * phi, min(max(ratio, low), high) * phi) / len(part)
                one["entropy"] -= sum(p * p.log() for p in probs) / len(part)
                one["approx_kl"] += (ratio - 1 - ratio.log()).item() / len(part)
                one["clipfrac"] += float(not 0.8 <= ratio <= 1.2) / len(part)
            loss = -one["objective"] - args.entropy_coef * one["entropy"]
            one["policy_loss"] = -one.pop("objective")
            grads = torch.autograd.grad(loss, [*trainer.actor.parameters()])
            norm = math.sqrt(sum(g.square().sum().item() for g in grads))
            one["grad_norm"] = norm
            for p, g in zip(trainer.actor.parameters(), grads, strict=True):
                p.data -= 0.1 * g * min(1.0, args.max_grad_norm / norm)
            seen.append({name: torch.as_tensor(value).item() for name, value in one.items()})
    return {name: sum(one[name] for one in seen) for name in seen[0]} | {"steps": len(seen)}


def sgd(trainer: cg.Trainer, rate=0.1) -> list:
    """Plain gradient steps in place of Adam's. Returns a list that grows with every step."""
    taken = []
    trainer.optimizer = torch.optim.SGD(trainer.actor.parameters(), lr=rate)
    trainer.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    return taken


@pytest.mark.parametrize("clip_norm", ["0.1", "inf"])
@pytest.mark.parametrize("size,epochs", [("7", "2"), ("128", "3"), ("24", "1")])
@pytest.mark.parametrize("group", [4, 3])
def test_update_in_loops_where_the_clip_acts(size, epochs, clip_norm, group):
    flags = ["--num_states", "10", "--group_size", str(group), "--batch_size", size]
    flags += ["--k_epochs", epochs]
    trainer = make_trainer(*flags, "--max_grad_norm", clip_norm, "--entropy_coef", "0.3")
    trainer.actor.double()
    for p in trainer.actor.parameters():
        p.data += 0.1 * torch.randn_like(p)
    observations = torch.randn(10, 4).double()
    actions = torch.randint(2, (10, group))
    logp = trainer.actor(observations).log_softmax(dim=1).detach().gather(1, actions)
    logp += 0.3 * torch.randn_like(logp)
    advantages = 0.3 + torch.randn_like(logp)
    use = torch.tensor([True] * 6 + [False, True, False, True])
    batch = cg.Batch(observations, use, actions, logp, torch.zeros(10, group, 1))
    ours = copy.copy(trainer)
    ours.actor, ours.generator = copy.deepcopy(trainer.actor), torch.Generator()
    ours.generator.set_state(trainer.generator.get_state())
    taken, before = sgd(ours), weights(ours)
    cg.update_model(ours, batch, advantages, use)
    expected = transcription(trainer, batch, advantages, use)
    close(weights(ours), weights(trainer), 2e-7)
    assert (weights(ours) - before).abs().max() > 1e-3
    row = {name[7:]: total for name, (total, number) in ours.sums.items()}
    assert {number for _, number in ours.sums.values()} == {len(taken)} == {expected.pop("steps")}
    assert 0.1 < expected["clipfrac"] / len(taken) < 0.9 and row.keys() == expected.keys()
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_rows_in_use(estimator, monkeypatch):
    """grpo, rloo: neither ended nor flat; none: not ended. Group statistics: not ended."""
    trainer, seen = make_trainer("--adv_estimator", estimator, "--gamma", "0.9"), []
    batch = random_batch()
    monkeypatch.setattr(cg, "visit", lambda _: None)
    monkeypatch.setattr(cg, "sample_batch", lambda _: batch)
    monkeypatch.setattr(cg, "update_model", lambda *a: seen.append(a))
    trainer.update()
    ((_, same_batch, advantages, use),) = seen
    rows = [0, 1, 2, 5] if estimator == "none" else [0, 2, 5]
    assert use.nonzero().flatten().tolist() == rows and same_batch is batch
    assert torch.equal(advantages, cg.prepare_inputs(trainer.args, batch)[1])
    assert (trainer.groups, trainer.flat, trainer.updates) == (4, 1, 1)
    scores = [
        [sum(0.9**t * r for t, r in enumerate(b)) for b in batch.rewards[s].tolist()]
        for s in (0, 1, 2, 5)
    ]
    row = {name: total / number for name, (total, number) in trainer.sums.items()}
    assert row["group/zero_std_frac"] == 0.25 and row["charts/horizon"] == cg.FIRST_HORIZON
    assert row["group/reward_std"] == pytest.approx(
        statistics.mean(statistics.stdev(group) for group in scores), abs=1e-6
    )
    trainer.update()
    assert (trainer.groups, trainer.flat, trainer.updates) == (8, 2, 2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_ratio_is_one_in_the_first_step_only(estimator):
    for epochs in ("1", "8"):
        flags = ["--adv_estimator", estimator, "--learning_rate", "1e-2", "--k_epochs", epochs]
        trainer = make_trainer(*flags, "--batch_size", "10000")
        while "losses/clipfrac" not in trainer.sums:
            trainer.update()
        trainer.train_seconds = 1.0
        row = trainer.row()
        assert row["losses/approx_kl"] == pytest.approx(0, abs=1e-7) or epochs == "8"
        assert (row["losses/approx_kl"] > 1e-4) == (epochs == "8")
        assert row["losses/clipfrac"] == 0 or epochs == "8"


def test_adam_and_the_gradients_clip():
    trainer = make_trainer("--learning_rate", "0.004", "--max_grad_norm", "0.001")
    trainer.args.k_epochs, trainer.args.batch_size = 1, 10000
    before = weights(trainer)
    while not trainer.sums.get("losses/grad_norm"):
        trainer.update()
    norm = torch.stack([p.grad.norm() for p in trainer.actor.parameters()]).norm().item()
    assert norm == pytest.approx(0.001, rel=1e-3)
    step = (weights(trainer) - before).abs().max().item()
    assert step == pytest.approx(0.004, rel=0.1)  # Adam's first step is the learning rate
    assert trainer.optimizer.defaults["eps"] == 1e-5


# ---- 4  the horizon ------------------------------------------------------------------------------


def flat_batch(flats: int, num: int, ended=0) -> cg.Batch:
    rewards = torch.arange(4.0).repeat(num + ended, 1)[:, :, None]
    rewards[:flats] = 1.0
    rewards[num:] = 1.0
    mask = torch.arange(num + ended) < num
    zeros = torch.zeros(num + ended, 4)
    return cg.Batch(zeros, mask, zeros.long(), zeros, rewards)


@pytest.mark.parametrize(
    "flats,num,ended,grows",
    [(7, 10, 0, False), (8, 10, 0, True), (5, 10, 9, False), (10, 10, 3, True), (0, 10, 0, False)],
)
@pytest.mark.parametrize("flags", [[], ["--horizon", "9"], ["--adv_estimator", "none"]])
def test_when_the_horizon_grows(flats, num, ended, grows, flags, monkeypatch):
    trainer = make_trainer(*flags)
    assert trainer.args.grow_above == (None if "--horizon" in flags else 0.7)
    assert trainer.horizon == (9 if "--horizon" in flags else cg.FIRST_HORIZON)
    monkeypatch.setattr(cg, "visit", lambda _: None)
    monkeypatch.setattr(cg, "sample_batch", lambda _: flat_batch(flats, num, ended))
    fixed, expected = "--horizon" in flags, trainer.horizon
    for _ in range(12):
        trainer.update()
        if grows and not fixed:
            expected = min(-(-3 * expected // 2), 500)
        assert trainer.horizon == expected
    assert trainer.sums["group/zero_std_frac"][0] == pytest.approx(12 * flats / num)
    if grows and not fixed:
        assert trainer.horizon == 500


def test_branches_are_as_long_as_the_horizon_is_now():
    trainer = make_trainer("--num_states", "2")
    trainer.actor = controller
    for trainer.horizon in (1, 20, 30, 45):
        assert cg.sample_batch(trainer).rewards.shape == (2, 8, trainer.horizon)


def test_horizons_limit_is_the_environments(monkeypatch):
    trainer = make_trainer("--env_id", "CartPole-v0")
    assert cg.FIRST_HORIZON == 20 and trainer.args.horizon is None
    monkeypatch.setattr(cg, "sample_batch", lambda _: flat_batch(3, 3))
    seen = []
    for _ in range(8):
        trainer.update()
        seen.append(trainer.horizon)
    assert seen == [30, 45, 68, 102, 153, 200, 200, 200]


FAST = ["--max_steps", "3000", "--eval_episodes", "2", "--run_name", "a", "--output_dir"]


@pytest.mark.parametrize(
    "flags",
    [["--horizon", "1"], ["--horizon", "1", "--reward", "shaped"], ["--horizon", "2"]],
)
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_too_short_a_horizon_moves_no_weight(flags, estimator, tmp_path, capsys):
    flags = [*flags, "--adv_estimator", estimator]
    assert cg.main([*FAST, str(tmp_path), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("100% of the groups were flat" in line for line in lines[-4:])
    (line,) = [line for line in lines[-4:] if line.startswith("all groups were flat")]
    assert "nothing was learned" in line and "--horizon" in line
    folder = tmp_path / cg.SCRIPT / "a"
    trained = cg.load_checkpoint(str(folder / "checkpoint-last.pt"))
    fresh = cg.Trainer(make_args(*FAST, str(tmp_path), *flags))
    assert same(trained["parts"]["actor"], fresh.actor.state_dict())
    assert trained["groups"][0] == trained["groups"][1] > 100
    assert all(row.get("group/zero_std_frac", 1) == 1 for row in metrics(folder))


@pytest.mark.parametrize("flags", [["--horizon", "2", "--reward", "shaped"], ["--horizon", "3"]])
def test_a_longer_horizon_is_not_flat(flags, monkeypatch):
    trainer = make_trainer(*flags, "--num_states", "4", "--group_size", "16")
    leaning = [[0, 0, 0.2, a] for a in (0.10, 0.15, 0.2, 0.25)]
    place(trainer, leaning)
    monkeypatch.setattr(cg, "visit", lambda _: None)
    before = weights(trainer)
    trainer.update()
    assert trainer.flat < trainer.groups == 4 and not torch.equal(before, weights(trainer))


def test_summary_says_flat_only_where_all_were(tmp_path):
    result = {"sampled": 480.0, "greedy": 474.0, "solved": False, "env_steps": 7000, "updates": 9}
    result |= {"train_seconds": 1.0, "seconds": 2.0, "horizon": 45, "flat": 0.5}
    result |= {"run_dir": "r/s/a", "stopped": False}
    args = make_args()
    text = cg.summary(result, args)
    assert "\nnot solved after 7,000 environment steps, 9 updates" in text
    assert "\n50% of the groups were flat; horizon 45" in text
    assert "all groups were flat" not in text and "--resume" not in text
    assert "\nsolved after" in cg.summary(result | {"solved": True}, args)
    text = cg.summary(result | {"stopped": True, "flat": 1.0}, args)
    assert "--resume r/s/a/checkpoint-last.pt" in text and "\nall groups were flat" in text


def test_what_is_said_of_flat_groups_is_true(tmp_path, capsys):
    """none learns from flat groups, too; from 3 steps on, the first action can change a reward."""
    assert cg.main([*FAST, str(tmp_path), "--horizon", "1", "--adv_estimator", "none"]) == 0
    text = capsys.readouterr().out
    trained = cg.load_checkpoint(str(tmp_path / cg.SCRIPT / "a" / "checkpoint-last.pt"))
    fresh = make_trainer().actor.state_dict()
    moved = not same(trained["parts"]["actor"], fresh)
    assert moved and trained["groups"][0] == trained["groups"][1]
    assert "100% of the groups were flat" in text
    assert "nothing was learned" not in text


def test_the_reason_given_for_flat_groups_is_true(tmp_path, capsys):
    """One state near the start, 3 steps: flat, but not because CartPole could not tell."""
    flags = ["--horizon", "3", "--num_states", "1", "--visit_steps", "1", "--max_steps", "60"]
    assert cg.main(["--eval_episodes", "2", "--output_dir", str(tmp_path), *flags]) == 0
    text = capsys.readouterr().out
    assert "100% of the groups were flat" in text
    assert "changes no reward" not in text


# ---- 5  what is counted, visits ------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--reward", "shaped"], ["--env_id", "CartPole-v0"]])
def test_every_step_is_counted(flags):
    trainer, live = make_trainer("--num_states", "5", *flags, "--horizon", "40"), [0, 0, 0]

    def spy(envs, branching: bool) -> None:
        real = envs.step

        def step(actions):
            dead = np.repeat(trainer.ended, 8) if branching else envs.prev_done.copy()
            if branching:
                if live[2] == 0:
                    spy.over = dead
                dead = spy.over
            live[branching] += int((~dead).sum())
            told = real(actions)
            if branching:
                spy.over = dead | told[2] | told[3]
                live[2] = 1
            return told

        envs.step = step

    spy(trainer.envs, False)
    spy(trainer.branches, True)
    for _ in range(25):
        live[2] = 0
        trainer.update()
    assert trainer.env_steps == live[0] + live[1] and live[0] > 1000 < live[1]
    assert 0 < 25 * 16 * 5 - live[0] < 400  # resets are no steps


def test_visits():
    """visit_steps of the policy, in each environment; its returns are counted."""
    trainer, rewards = make_trainer("--num_states", "7", "--visit_steps", "5"), np.zeros(7)
    real, calls, finished = trainer.envs.step, [], []

    def step(actions):
        told = real(actions)
        calls.append(actions)
        rewards[:] += told[1]
        for n in np.flatnonzero(told[2] | told[3]):
            finished.append(rewards[n])
            rewards[n] = 0
        return told

    trainer.envs.step = step
    for k in range(1, 20):
        cg.visit(trainer)
        assert len(calls) == 5 * k
    assert trainer.finished == finished and len(finished) > 10
    assert trainer.running.tolist() == rewards.tolist()
    assert trainer.observation.tolist() == trainer.envs.state.T.astype(np.float32).tolist()
    assert trainer.ended.tolist() == trainer.envs.prev_done.tolist()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_random_visits(share):
    flags = ["--num_states", "2000", "--visit_steps", "5", "--random_visits", str(share)]
    trainer, pushed = make_trainer(*flags), []
    with torch.no_grad():
        trainer.actor[-1].bias.copy_(torch.tensor([0.0, 1.5]))
    p = torch.tensor([0.0, 1.5]).softmax(dim=0)[1].item()
    real = trainer.envs.step
    trainer.envs.step = lambda a: pushed.append(a) or real(a)
    cg.visit(trainer)
    expected = share * 0.5 + (1 - share) * p
    found, sigma = np.mean(pushed), math.sqrt(expected * (1 - expected) / 10000)
    assert abs(found - expected) < 4 * sigma + 0.005
    place(trainer, [[0, 0, 0, 0]] * 2000)
    first = cg.sample_batch(trainer).actions.float().mean().item()
    assert abs(first - p) < 0.02  # branches are the policy's, always


# ---- 6  evaluation, run folder, metrics, checkpoints, resume -------------------------------------


def short(folder: Path, name: str, *flags: str) -> list[str]:
    """A run of some 30000 steps, 25 updates, with three checkpoints, evaluated at each."""
    line = "--quiet --threads 1 --max_steps 30000 --save_steps 8000 --eval_every 8000 "
    line += "--num_states 8 --eval_episodes 3 --target_return 0 --run_name " + name
    line += "" if "--horizon" in flags else " --grow_above 0.1"
    return [*line.split(), "--output_dir", str(folder), *flags]


def test_evaluate_halves_and_first_episodes_only():
    envs = cg.make_envs("CartPole-v1", 40)
    right = lambda x: torch.tensor([[0.0, 50.0]]).expand(len(x), 2)  # noqa: E731
    for seed in ([], [7]):
        envs.reset(seed=seed[0] if seed else cg.UNSEEN)
        starts = np.array(envs.state)
        lengths = [len(follow(starts[:, n], [1] * 99, 0, 500)[0]) for n in range(40)]
        result = cg.evaluate(right, envs, CPU, *seed)
        assert result["eval/greedy"] == pytest.approx(statistics.mean(lengths[:20]))
        assert result["eval/sampled"] == pytest.approx(statistics.mean(lengths[20:]))
        assert result["eval/greedy"] != result["eval/sampled"]
    soft = cg.evaluate(lambda x: controller(x, 0.1), envs, CPU)
    assert soft["eval/greedy"] > 300 and soft["eval/sampled"] < 60
    assert soft == cg.evaluate(lambda x: controller(x, 0.1), envs, CPU)
    assert cg.evaluate(controller, cg.make_envs("CartPole-v0", 8), CPU)["eval/greedy"] == 200


def test_draw_is_softmax():
    logits = torch.tensor([0.3, -1.0, 2.0])
    actions = cg.draw(logits.expand(100_000, 3), torch.Generator().manual_seed(0))
    expected = logits.softmax(dim=0).double().numpy() * 1e5
    found = actions.bincount(minlength=3).numpy()
    assert stats.chisquare(found, expected / expected.sum() * 1e5).pvalue > 1e-4


def test_the_seed_reaches_networks_starts_and_actions():
    one, again, two = (make_trainer("--seed", seed) for seed in ("1", "1", "2"))
    for get in (weights, lambda t: torch.tensor(t.observation), lambda t: t.generator.get_state()):
        assert torch.equal(get(one), get(again)) and not torch.equal(get(one), get(two))


@pytest.mark.parametrize("flags", [["--adv_estimator", "grpo"], ["--adv_estimator", "none"]])
def test_resume_equals_never_stopping(flags, tmp_path, monkeypatch):
    assert cg.main(short(tmp_path, "whole", *flags)) == 0
    whole = tmp_path / cg.SCRIPT / "whole"
    first = sorted(whole.glob("checkpoint-0*.pt"))[0]
    half, updates = check_resume(cg, whole, first.name, monkeypatch)
    early, late = state(half, first.name), state(half)
    assert updates == late["counters"][1] - early["counters"][1]  # not all over again
    assert cg.FIRST_HORIZON < early["groups"][2] < late["groups"][2]
    assert all(0 < a < b for a, b in zip(early["groups"], late["groups"], strict=True))
    steps = [row["step"] for row in metrics(whole)]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] >= 30000
    assert cg.main(short(tmp_path, "again", *flags)) == 0
    assert same(state(whole), state(tmp_path / cg.SCRIPT / "again"))
    assert metrics(whole) == metrics(tmp_path / cg.SCRIPT / "again")
    assert cg.main(short(tmp_path, "other", *flags, "--seed", "7")) == 0
    assert not same(state(whole)["parts"], state(tmp_path / cg.SCRIPT / "other")["parts"])


def test_a_checkpoint_between_an_end_and_its_reset(tmp_path):
    """Everything that a trainer has is in it."""
    flags = ["--num_states", "6", "--visit_steps", "3", "--reward", "shaped"]
    one, two = (make_trainer(*flags, "--seed", seed) for seed in ("1", "2"))
    while not (one.ended.any() and one.updates > 9 and one.finished):
        one.update()
    one.horizon = 33
    one.save_model(tmp_path / "a.pt")
    two.load_model(str(tmp_path / "a.pt"))
    for _ in range(3):
        for name in ("state", "steps", "prev_done"):
            assert np.array_equal(getattr(one.envs, name), getattr(two.envs, name))
        for name in ("observation", "ended", "running"):
            assert np.array_equal(getattr(one, name), getattr(two, name))
        for name in ("env_steps", "updates", "groups", "flat", "horizon", "finished", "sums"):
            assert getattr(one, name) == getattr(two, name)
        assert torch.equal(weights(one), weights(two))
        one.update()
        two.update()


def test_interrupt_saves_and_resumes_exactly(tmp_path, monkeypatch, capsys):
    flags = short(tmp_path, "a", "--save_steps", "0")
    flags.remove("--quiet")
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, cg, 5)
        assert cg.main(flags) == 130
    assert signal.getsignal(signal.SIGINT) is before
    folder = tmp_path / cg.SCRIPT / "a"
    assert f"go on: python {cg.SCRIPT}.py --resume {folder}/check" in capsys.readouterr().out
    assert state(folder)["counters"][1] == 5
    assert cg.main(["--resume", str(folder / "checkpoint-last.pt"), "--quiet"]) == 0
    assert cg.main(short(tmp_path, "b", "--save_steps", "0")) == 0
    assert same(state(folder), state(tmp_path / cg.SCRIPT / "b"))
    assert metrics(folder) == metrics(tmp_path / cg.SCRIPT / "b")
    check_second_interrupt(cg, short(tmp_path, "c"), monkeypatch, capsys)


def test_interrupt_before_the_first_update_leaves_something_to_resume(
    tmp_path, monkeypatch, capsys
):
    flags = short(tmp_path, "a", "--max_steps", "5000")
    with monkeypatch.context() as patch:
        interrupt_first_evaluation(patch, cg)
        assert cg.main([flag for flag in flags if flag != "--quiet"]) == 130
    path = tmp_path / cg.SCRIPT / "a" / "checkpoint-last.pt"
    text = capsys.readouterr().out
    assert str(path) in text and path.exists() and "all groups were flat" not in text
    assert cg.main(["--resume", str(path), "--quiet"]) == 0
    assert cg.main(short(tmp_path, "b", "--max_steps", "5000")) == 0
    assert same(state(path.parent)["parts"], state(tmp_path / cg.SCRIPT / "b")["parts"])


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    assert cg.main(short(tmp_path, "a", "--max_steps", "5000")) == 0
    path = tmp_path / cg.SCRIPT / "a" / "checkpoint-last.pt"
    flags = ["--resume", str(path), "--max_steps", "7000"]
    check_full_disk(cg, path, flags, monkeypatch, capsys)


def test_kill_while_saving_keeps_the_last_checkpoint(tmp_path):
    """kill -9 between writing the temporary file and renaming it, and in the middle of writing."""
    assert cg.main(short(tmp_path, "a", "--max_steps", "5000")) == 0
    folder = tmp_path / cg.SCRIPT / "a"
    path = folder / "checkpoint-last.pt"
    check_kill_while_saving(cg, path, "--max_steps", "7000")
    assert cg.main(["--resume", str(path), "--max_steps", "7000", "--quiet"]) == 0
    steps = [row["step"] for row in metrics(folder)]
    assert steps == sorted(set(steps)) and steps[-1] >= 7000


@pytest.mark.parametrize(
    "name,tensor", [("compute_grpo", "advantages"), ("clipped_surrogate", "loss")]
)
def test_nan_stops_the_run_and_names_the_tensor(name, tensor, tmp_path, monkeypatch, capsys):
    break_with_nan(monkeypatch, cg, name, after=6)
    assert cg.main(short(tmp_path, "a", "--save_steps", "1", "--k_epochs", "1")) == 1
    error = capsys.readouterr().err
    assert f"{tensor} is NaN" in error and error.count("\n") == 1 and "update " in error
    folder = tmp_path / cg.SCRIPT / "a"
    assert all(v.isfinite().all() for v in state(folder)["parts"]["actor"].values())


def test_nan_names_the_update_that_failed(tmp_path, monkeypatch, capsys):
    real = cg.prepare_inputs
    runs = []

    def broken(args, batch):
        runs.append(1)
        scores, advantages = real(args, batch)
        return scores, advantages * (math.nan if len(runs) == 4 else 1.0)

    monkeypatch.setattr(cg, "prepare_inputs", broken)
    assert cg.main(short(tmp_path, "a", "--save_steps", "1")) == 1
    folder = tmp_path / cg.SCRIPT / "a"
    assert state(folder)["counters"][1] == 3  # saved after each update
    assert "update 4: " in capsys.readouterr().err


@pytest.mark.parametrize("estimator", ["grpo", "none"])
def test_run_folder_and_tags(estimator, tmp_path):
    flags = ["--adv_estimator", estimator, "--env_id", "CartPole-v0"]
    assert cg.main(short(tmp_path, "a", *flags)) == 0
    folder = tmp_path / cg.SCRIPT / "a"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoint-last.pt"} <= names
    assert [*folder.glob("checkpoint-0*.pt")] and not [*folder.glob("*.tmp")]
    config = json.loads((folder / "config.json").read_text())
    assert config["seed"] == 42 and config["adv_estimator"] == estimator and config["torch"]
    losses = "policy_loss entropy approx_kl clipfrac grad_norm"
    expected = {f"losses/{name}" for name in losses.split()}
    expected |= {f"charts/{name}" for name in ("learning_rate", "updates", "train_seconds", "SPS")}
    expected |= {"charts/horizon", "group/zero_std_frac", "group/reward_std"}
    score = {"charts/episodic_return", "charts/episodic_length"}
    score |= {"score/mean", "score/max", "score/min"}
    evaluated = {"eval/greedy", "eval/sampled"}
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0].keys() == {"step", *evaluated}
    for row in rows[1:]:
        assert row.keys() - evaluated - score - {"step"} == expected
        assert all(math.isfinite(v) for v in row.values())
    assert any(row.keys() >= score for row in rows) and rows[-1].keys() >= evaluated
    events = events_of(folder, images=0)
    tags = set(events.Tags()["scalars"])
    assert tags == expected | score | evaluated | {"hparam/greedy", "hparam/sampled"}
    assert events.Tags()["images"] == ["agent/sampled"]
    told = [(e.step, e.value) for e in events.Scalars("losses/policy_loss")]
    assert told == [
        (row["step"], pytest.approx(row["losses/policy_loss"], rel=1e-5)) for row in rows[1:]
    ]
    kept = (folder / "metrics.jsonl").read_text()
    assert cg.main(short(tmp_path, "a", "--max_steps", "1000")) == 0
    assert (tmp_path / cg.SCRIPT / "a-2").is_dir()  # never overwritten
    assert (folder / "metrics.jsonl").read_text() == kept


def test_a_row_is_the_mean_since_the_last():
    trainer, seen = make_trainer("--num_states", "16"), []
    trainer.record = lambda m: (seen.append(m), cg.Trainer.record(trainer, m))
    trainer.train_seconds = 2.0
    for _ in range(2):  # the second row starts afresh
        seen.clear()
        assert trainer.finished == []
        for _ in range(4):
            trainer.update()
        finished, row = list(trainer.finished), trainer.row()
        assert len([m for m in seen if "group/reward_std" in m]) == 4
        for name in {name for m in seen for name in m}:
            mean = statistics.mean(torch.as_tensor(m[name]).item() for m in seen if name in m)
            assert row[name] == pytest.approx(mean, rel=1e-6, abs=1e-9)
        assert row["charts/SPS"] == trainer.env_steps / 2.0
        told = [row[f"score/{name}"] for name in ("mean", "max", "min")]
        assert told == [statistics.mean(finished), max(finished), min(finished)]
        assert row["charts/episodic_return"] == row["charts/episodic_length"] == told[0]


def test_early_stop(tmp_path, monkeypatch):
    run = lambda name, *flags: cg.train(  # noqa: E731
        cg.parse_args(
            [*short(tmp_path, name, "--eval_every", "500", "--max_steps", "6000"), *flags]
        )
    )
    result = run("a", "--target_return", "5")
    assert 500 <= result["env_steps"] < 4000 and not result["stopped"] and not result["solved"]
    told = {"eval/greedy": 100.0, "eval/sampled": 40.0}
    monkeypatch.setattr(cg, "evaluate", lambda *a, **k: dict(told))
    assert run("c", "--target_return", "50")["env_steps"] >= 6000  # both must reach it
    told["eval/sampled"] = 50.0
    result = run("d", "--target_return", "50")
    assert not result["solved"] and result["env_steps"] < 4000 and result["sampled"] == 50
    told |= {"eval/greedy": 475.0, "eval/sampled": 475.0}
    result = run("f", "--target_return", "0")
    assert result["solved"] and result["env_steps"] >= 6000
    last = cg.load_checkpoint(result["run_dir"] + "/checkpoint-last.pt")
    assert result["flat"] == last["groups"][1] / last["groups"][0]
    assert result["horizon"] == last["groups"][2]
    told["eval/sampled"] = 474.9
    assert not run("g")["solved"]
    assert make_args().target_return == 475
    assert make_args("--env_id", "CartPole-v0").target_return == 195
    assert make_args("--seed", "3", "--env_id", "CartPole-v0").run_name == "grpo-v0-seed3"


def test_evaluations_logs_and_checkpoints_come_when_due(tmp_path):
    flags = ["--eval_every", "5000", "--save_steps", "7000", "--max_steps", "21000"]
    assert cg.main(short(tmp_path, "a", *flags, "--horizon", "5")) == 0
    rows = metrics(tmp_path / cg.SCRIPT / "a")
    evaluated = [row["step"] for row in rows if "eval/greedy" in row]
    assert [step // 5000 for step in evaluated] == [0, 1, 2, 3, 4, 4]
    assert {row["step"] // 1000 for row in rows} == set(range(22))
    saved = sorted((tmp_path / cg.SCRIPT / "a").glob("checkpoint-0*.pt"))
    assert [int(path.stem[-6:]) // 7000 for path in saved] == [1, 2, 3]
    for path in saved:
        assert cg.load_checkpoint(str(path))["counters"][0] == int(path.stem[-6:])


def test_infer(tmp_path, capsys):
    assert cg.main(short(tmp_path, "a", "--max_steps", "5000")) == 0
    path = tmp_path / cg.SCRIPT / "a" / "checkpoint-last.pt"
    before = path.read_bytes(), sorted(path.parent.iterdir())
    assert cg.main(["--infer", str(path)]) == 0
    text = capsys.readouterr().out
    last = metrics(path.parent)[-1]
    assert f"greedy {last['eval/greedy']:.1f}, sampled {last['eval/sampled']:.1f}" in text
    assert "3 unseen episodes" in text and "threshold 475" in text
    assert cg.main(["--infer", str(path)]) == 0
    assert capsys.readouterr().out == text  # the same seed shows the same
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before
    more = ["--seed", "1", "--greedy", "--render", "gif", "--env_id", "CartPole-v0"]
    assert cg.main(["--infer", str(path), *more]) == 0
    assert "threshold 195" in capsys.readouterr().out
    from PIL import Image

    with Image.open(path.with_name("episode-seed1.gif")) as gif:
        assert gif.format == "GIF" and gif.n_frames >= 2
    assert path.read_bytes() == before[0]


def test_play_takes_the_policys_actions():
    seen = []

    class Policy(torch.nn.Linear):
        def forward(self, x):
            seen.append(x[0].tolist())
            return controller(x, 0.1)

    args = make_args("--env_id", "CartPole-v0")
    args.greedy = True
    frames, total = cg.play(Policy(4, 2), args, "rgb_array")
    assert total == 200 and len(frames) == 50 and frames[0].shape == (200, 300, 3)
    start, _ = gym.make("CartPole-v0").reset(seed=cg.UNSEEN + 42)
    assert seen[0] == start.tolist()  # one that no training starts from
    args.greedy, totals = False, set()
    for args.seed in range(4):
        totals.add(cg.play(Policy(4, 2), args, "rgb_array")[1])
    assert len(totals) > 1 and max(totals) < 150


def test_starts_of_the_evaluation_are_unseen_and_the_same_for_all_seeds():
    starts, trained = [], set()
    for seed in ("1", "2"):
        trainer = make_trainer("--seed", seed, "--eval_episodes", "40")
        trained |= {tuple(row) for row in trainer.observation.tolist()}
        cg.evaluate(controller, trainer.eval_envs, CPU)
        kept = []
        cg.evaluate(lambda x, kept=kept: kept.append(x) or controller(x), trainer.eval_envs, CPU)
        starts.append({tuple(row) for row in kept[0].tolist()})
    assert starts[0] == starts[1] and len(starts[0]) == 80 and not trained & starts[0]


def test_network():
    """Orthogonal weights of gain sqrt 2, sqrt 2 and 0.01, biases 0, tanh between them."""
    net = make_trainer("--hidden_size", "16").actor
    (w1, b1), (w2, b2), (w3, b3) = ((x.weight, x.bias) for x in net[::2])
    close(w1.T @ w1, 2 * torch.eye(4), 1e-5)
    close(w2.T @ w2, 2 * torch.eye(16), 1e-5)
    close(w3 @ w3.T / 0.01**2, torch.eye(2), 1e-5)
    assert not any(b.any() for b in (b1, b2, b3))
    x = torch.randn(7, 4)
    close(net(x), (w3 @ (w2 @ (w1 @ x.T).tanh()).tanh()).T, 1e-5)


# ---- 7  bad input --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    folder, bad = (tmp_path_factory.mktemp(name) for name in ("good", "bad"))
    assert cg.main(short(folder, "a", "--max_steps", "5000", "--save_steps", "2000")) == 0
    good = folder / cg.SCRIPT / "a" / "checkpoint-last.pt"
    earlier = sorted(good.parent.glob("checkpoint-0*.pt"))[0]
    return bad_files(cg, good, bad, missing="hidden_size") | {"EARLIER": earlier}


@pytest.mark.parametrize(
    "line,word",
    [
        ("--horizon 0", "horizon"),
        ("--horizon x", "horizon"),
        ("--group_size 1", "group_size"),
        ("--num_states 0", "num_states"),
        ("--visit_steps 0", "visit_steps"),
        ("--random_visits 1.1", "random_visits"),
        ("--grow_above -1", "grow_above"),
        ("--horizon 5 --grow_above 0.5", "grow_above"),
        ("--greedy", "greedy"),
        ("--gamma 2", "gamma"),
        ("--gamma nan", "gamma"),
        ("--env_id Pendulum-v1", "env_id"),
        ("--reward nonsense", "reward"),
        ("--adv_estimator gae", "adv_estimator"),
        ("--run_name a/b", "run_name"),
        ("--run_name ..", "run_name"),
        ("--clip_epsilon -0.1", "clip_epsilon"),
        ("--max_steps 0", "max_steps"),
        ("--max_grad_norm 0", "max_grad_norm"),
        ("--batch_size 0", "batch_size"),
        ("--k_epochs 0", "k_epochs"),
        ("--seed 2147483648", "seed"),
        ("--device nonsense", "device"),
        ("--resume MISSING", "resume"),
        ("--resume TRUNCATED", "resume"),
        ("--resume FOREIGN", "resume"),
        ("--resume SISTER", "resume"),
        ("--resume OLDER", "resume"),
        ("--resume FOLDER", "resume"),
        ("--resume EARLIER --max_steps 90000", "resume"),
        ("--resume CHECKPOINT", "max_steps"),
        ("--resume CHECKPOINT --max_steps 90000 --adv_estimator none", "adv_estimator"),
        ("--resume CHECKPOINT --max_steps 90000 --seed 1", "seed"),
        ("--resume CHECKPOINT --max_steps 90000 --horizon 20", "horizon"),
        ("--resume CHECKPOINT --max_steps 90000 --group_size 4", "group_size"),
        ("--resume CHECKPOINT --max_steps 90000 --reward shaped", "reward"),
        ("--infer CHECKPOINT --resume CHECKPOINT", "infer"),
        ("--infer CHECKPOINT --gamma 0.1", "gamma"),
        ("--infer MISSING", "infer"),
    ],
)
def test_bad_input(line, word, tmp_path, capsys, files):
    flags = [str(files.get(flag, flag)) for flag in line.split()]
    untouched = [files["FOLDER"], files["CHECKPOINT"].parent]
    error = check_refused(cg, flags, tmp_path, capsys, untouched)
    assert error.startswith(f"argument --{word}")


def test_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    check_unwritable(cg, short(tmp_path / "file", "a"), capsys)


def test_nothing_is_created_on_the_wrong_device():
    """Tensors made without a device would land on the default one, here the shapeless `meta`."""
    trainer = make_trainer("--device", "cpu")
    trainer.update()  # Adam makes its state at the first step
    with torch.device("meta"):
        trainer.update()
        result = cg.evaluate(trainer.actor, trainer.eval_envs, trainer.device)
    assert all(math.isfinite(v) for v in result.values()) and trainer.sums


@pytest.mark.cuda
def test_cuda(tmp_path):
    assert cg.main(short(tmp_path, "a", "--device", "cuda")) == 0
    assert state(tmp_path / cg.SCRIPT / "a")["counters"][0] >= 30000


# ---- 8  learning ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed,flags",
    [
        ("302", []),
        ("1", ["--adv_estimator", "rloo"]),
        ("1", ["--adv_estimator", "none", "--env_id", "CartPole-v0"]),
        ("1", ["--reward", "shaped"]),
    ],
)
def test_default_run_solves(seed, flags, tmp_path):
    every = ["--eval_every", "40000", "--seed", seed, "--output_dir", str(tmp_path)]
    result = cg.train(make_args(*every, *flags))
    assert result["solved"] and result["env_steps"] < 2_000_000
    assert min(result["greedy"], result["sampled"]) >= (195 if "CartPole-v0" in flags else 475)
    rows = metrics(Path(result["run_dir"]))
    assert rows[0]["eval/sampled"] < 60
