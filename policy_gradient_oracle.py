# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.0", "numpy>=1.26",
#     "tensorboard>=2.20", "tqdm>=4.66",
# ]
# ///
"""The policy gradient, exact, and what every estimator makes of it: bias and noise, measured.

Article: 07_Reinforcement_Learning (马尔可夫决策过程, 价值函数, 策略梯度法), and the other three
Run:     python policy_gradient_oracle.py                 (about 40 s)
         prints one row an estimator: its scale along the true gradient, its share off it, its noise
         python policy_gradient_oracle.py --show values   V, Q, A of a policy, V*, Q*, on the map
Watch:   tensorboard --logdir runs

FrozenLake's transition table is known, so J(theta) under the step limit is a short recursion, and
autograd through it gives its gradient. Each estimator then sees many batches of episodes, always
the same ones, and its mean and its scatter are held against that truth, with standard errors.

Keeps:   the estimators of the other scripts, the same functions to the letter.
Changes: nothing is trained but by the exact gradient; one map; episodes, not parallel steps.
Gamma:   the gradient of a discounted J weighs the return from step t on by gamma^t. Estimators in
         use leave that out: below --gamma 1 all but vanilla, rloo and grpo:none are biased, by as
         much as the table shows.

symbol   | variable  | shape     | meaning
theta    | logits    | (S, 4)    | of a tabular softmax policy, S cells; or a CNN's outputs
pi       | probs     | (S, 4)    | the policy
P, r     |           | (S, 4, S) | probability to go on in s'; expected reward (S, 4)
V, Q     | values    | (H+1, S)  | with H - t steps to go; Q (H, S, 4)
g        | samples   | (M, 4*S)  | what an estimator makes of each of M batches
Phi      | phi       | (N, T)    | weight of grad log pi(a_t|s_t); N = M * E episodes
"""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

# ======== 1  The maths: the estimators' parts, as in the other scripts ============================


def discounted_return(rewards: Tensor, gamma: float) -> Tensor:
    """(E,) return of rewards (E, T). Below gamma 1, a shorter walk to the goal is worth more."""
    # R = sum_t gamma^t * r_t
    t = torch.arange(rewards.shape[1], dtype=rewards.dtype, device=rewards.device)
    return (rewards * gamma**t).sum(dim=1)


def compute_vanilla(rewards: Tensor, gamma: float) -> Tensor:
    """(N, T) weight of every step: the return of its whole episode (原始策略梯度法)."""
    # Phi_t = G(tau) = sum_t gamma^t * r_t
    return discounted_return(rewards, gamma)[:, None].expand_as(rewards)


def compute_reinforce(rewards: Tensor, gamma: float) -> Tensor:
    """(N, T) returns of what came after each action (REINFORCE; Williams 1992)."""
    # Phi_t = G_t = r_t + gamma * G_{t+1}
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = rewards[:, t] + gamma * following
        returns[:, t] = following
    return returns


def compute_baseline(returns: Tensor, values: Tensor, mask: Tensor, kind: str) -> Tensor:
    """(N, T) returns less a baseline (带基线的策略梯度法).

    value: V(s_t), unbiased. batch_time_mean: mean over the n episodes that are still on at t; each
    is in its own mean, which leaves (n - 1) / n of its weight. trajectory_mean: the notes' mean
    over the episode's own G_t; it depends on the actions, and that is a bias (erratum 12).
    """
    if kind == "trajectory_mean":
        values = (returns * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    elif kind == "batch_time_mean":
        values = (returns * mask).sum(dim=0) / mask.sum(dim=0)
    # Phi_t = G_t - b
    return returns - values


def compute_td(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, gamma: float
) -> Tensor:
    """(N, T) one-step TD errors (Actor-Critic). Termination cuts the bootstrap, the limit not."""
    # Phi_t = delta_t = r_t + gamma * V(s_{t+1}) * (1 - terminated_t) - V(s_t)
    return rewards + gamma * next_values * ~terminated - values


def compute_nstep(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    n: int,
) -> Tensor:
    """(N, T) n-step advantages: n rewards, then V (多步 TD 误差).

    Fewer where the episode or the batch ends before. n 1: the TD error; n >= T: Monte Carlo.
    """
    delta = advantages = compute_td(rewards, values, next_values, terminated, gamma)
    go_on = gamma * (~(terminated | truncated)).to(delta.dtype)
    for _ in range(min(n, delta.shape[1]) - 1):
        # Phi_t = A_t^(n) = delta_t + gamma * (1 - done_t) * A_{t+1}^(n-1)
        advantages = delta + go_on * F.pad(advantages[:, 1:], (0, 1))
    return advantages


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalised advantage estimates, all (N, T) (Schulman et al. 2016, eq. 16).

    next_values[t] is V of the observation that step t led to, before any reset. Termination cuts
    the bootstrap, truncation (the time limit) does not; both cut the recursion.
    """
    assert rewards.shape == values.shape == next_values.shape
    # delta_t = r_t + gamma * V(s_{t+1}) * (1 - terminated_t) - V(s_t)
    delta = rewards + gamma * next_values * ~terminated - values
    # A_t = delta_t + gamma * lam * (1 - done_t) * A_{t+1}
    decay = gamma * lam * (~(terminated | truncated)).to(delta.dtype)
    advantages = torch.zeros_like(delta)
    following = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        following = delta[:, t] + decay[:, t] * following
        advantages[:, t] = following
    return advantages


def compute_grpo(scores: Tensor, scale_rewards: str = "group") -> Tensor:
    """Group-relative advantages (B, G) of scores (B, G) (DeepSeekMath 4.1.2; 群体标准化).

    scale_rewards: divide by the std of the "group" or of the whole "batch", or not ("none", Dr.
    GRPO). The std is unbiased (ddof 1) plus 1e-4, as in TRL. A flat group gets exactly 0.
    """
    # A_i = (R_i - mean(R)) / (std(R) + eps)
    advantages = scores - scores.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (scores.std(dim=1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages.masked_fill(flat_groups(scores)[:, None], 0.0)


def compute_rloo(scores: Tensor) -> Tensor:
    """Leave-one-out advantages (B, G) (Kool et al. 2019; Ahmadian et al. 2024)."""
    # A_i = R_i - mean_{j != i}(R_j) = (R_i - mean(R)) * G / (G - 1)
    group_size = scores.shape[1]
    advantages = (scores - scores.mean(dim=1, keepdim=True)) * group_size / (group_size - 1)
    return advantages.masked_fill(flat_groups(scores)[:, None], 0.0)


def flat_groups(scores: Tensor) -> Tensor:
    """(B,) bool: all scores equal. No signal; dividing by their std would amplify rounding."""
    return scores.amax(dim=1) == scores.amin(dim=1)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's objective per step, to be maximised (Schulman et al. 2017, eq. 7; high: DAPO)."""
    assert ratio.shape == advantages.shape
    # min(rho * A, clip(rho, 1 - low, 1 + high) * A)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def kl_k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimates KL(pi || pi_ref) at actions sampled from pi; never negative (Schulman 2020)."""
    # k3 = pi_ref / pi - log(pi_ref / pi) - 1
    log_ratio = logp_ref - logp
    return log_ratio.exp() - log_ratio - 1


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension."""
    # H = -sum_a pi(a) * log pi(a)
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def aggregate(per_step: Tensor, mask: Tensor, loss_type: str, max_length: int) -> Tensor:
    """One number from terms (E, T), by TRL's names.

    bnpo: mean over all steps, so a long episode weighs more (the article's code). grpo: mean over
    each episode's steps, then over episodes (the paper's 1/|o_i|). dr_grpo: sum / (E * max_length).
    """
    per_step = per_step.masked_fill(~mask, 0.0)
    if loss_type == "bnpo":
        return per_step.sum() / mask.sum()
    if loss_type == "grpo":
        return (per_step.sum(dim=1) / mask.sum(dim=1)).mean()
    return per_step.sum() / (mask.shape[0] * max_length)


def pair_differences(x: Tensor) -> Tensor:
    """x_i - x_j of all ordered pairs i != j of a group: (..., K) -> (..., K * (K - 1))."""
    others = ~torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    return (x[..., :, None] - x[..., None, :])[..., others]


def pairwise_linear(log_weights: Tensor, scores: Tensor, temperature: Tensor) -> Tensor:
    """The article's loss as printed (3.2), to be minimised: (..., K) -> (...).

    log sigma(-x) = log sigma(x) - x, so the two orders of a pair leave -dR/T * dw and no sigmoid:
    REINFORCE with the others' mean as baseline, divided by T (erratum 16), and by the text's length
    where w is of the mean ratio. Unbounded in dR and dw.
    """
    assert log_weights.shape == scores.shape
    # L = mean_{i != j} -log sigma((R_i - R_j) / T) * (w_i - w_j)
    return -(
        F.logsigmoid(pair_differences(scores / temperature)) * pair_differences(log_weights)
    ).mean(dim=-1)


def pairwise_logistic(log_weights: Tensor, scores: Tensor, temperature: Tensor) -> Tensor:
    """What the article's prose says, to be minimised: (..., K) -> (...).

    The model's P(i beats j) = sigma(w_i - w_j) is fitted to sigma((R_i - R_j) / T). At the sampling
    policy a pair pulls with sigma(dR / T) - 1/2, never more; it stops at w_i - w_j = (R_i - R_j)/T.
    """
    assert log_weights.shape == scores.shape
    # L = mean_{i != j} -p * log sigma(w_i - w_j) - (1 - p) * log sigma(w_j - w_i)
    p = pair_differences(scores / temperature).sigmoid()
    return F.binary_cross_entropy_with_logits(
        pair_differences(log_weights), p, reduction="none"
    ).mean(dim=-1)


# ======== 2  Environment: gymnasium's table, and what follows from it exactly =====================


@dataclass
class Lake:
    """One map, with the physics of gymnasium's `env.unwrapped.P`; K outcomes of an action."""

    rows: tuple[str, ...]
    start: int
    live: Tensor  # (S,) bool: S and F cells
    prob: Tensor  # (S, 4, K) float64
    next_cell: Tensor  # (S, 4, K) long
    reward: Tensor  # (S, 4, K) float64
    terminated: Tensor  # (S, 4, K) bool
    P: Tensor  # (S, 4, S) float64: probability to go on in a cell
    r: Tensor  # (S, 4) float64: expected reward


def build_lake(rows: tuple[str, ...], slippery: bool) -> Lake:
    """Read gymnasium's table of a map, and sum its outcomes up."""
    table = FrozenLakeEnv(desc=list(rows), is_slippery=slippery).P
    ended = [(0.0, 0, 0.0, True)] * 2 if slippery else []  # holes and goals have only one outcome
    full = [[(table[s][a] + ended)[: 1 + len(ended)] for a in range(4)] for s in table]
    array = torch.tensor(full, dtype=torch.float64)  # (S, 4, K, 4)
    tiles = "".join(rows)
    prob, next_cell, reward = array[..., 0], array[..., 1].long(), array[..., 2]
    terminated = array[..., 3].bool()
    go_on = torch.zeros(len(tiles), 4, len(tiles), dtype=torch.float64)
    go_on.scatter_add_(2, next_cell, prob * ~terminated)
    live = torch.tensor([tile in "SF" for tile in tiles])
    expected = (prob * reward).sum(dim=2)
    return Lake(rows, tiles.index("S"), live, prob, next_cell, reward, terminated, go_on, expected)


def exact_values(lake: Lake, probs: Tensor, gamma: float, horizon: int) -> tuple[Tensor, Tensor]:
    """V (H + 1, S) and Q (H, S, 4) of probs (S, 4) under the step limit; autograd goes through."""
    values, table = [torch.zeros_like(lake.r[:, 0])], []
    for _ in range(horizon):
        # Q_t = r + gamma * P V_{t+1};  V_t = sum_a pi(a|s) * Q_t(s, a);  V_H = 0
        table.append(lake.r + gamma * lake.P @ values[-1])
        values.append((probs * table[-1]).sum(dim=1))
    return torch.stack(values[::-1]), torch.stack(table[::-1])


def exact_return(lake: Lake, probs: Tensor, gamma: float, horizon: int) -> Tensor:
    """J = V_0(start)."""
    return exact_values(lake, probs, gamma, horizon)[0][0, lake.start]


def exact_kl(lake: Lake, log_probs: Tensor, log_ref: Tensor, horizon: int) -> Tensor:
    """KL of episodes, E_pi[sum_t KL(pi(.|s_t) || ref(.|s_t))]; autograd goes through."""
    probs = log_probs.exp()
    kl = (probs * (log_probs - log_ref)).sum(dim=1) * lake.live  # (S,)
    value = torch.zeros_like(kl)
    for _ in range(horizon):
        value = kl + (probs * (lake.P @ value)).sum(dim=1)
    return value[lake.start]


def visits(lake: Lake, probs: Tensor, horizon: int) -> Tensor:
    """(H, S) probability to act in a cell at step t."""
    at = F.one_hot(torch.tensor(lake.start), len(probs)).to(probs)
    found = [at]
    for _ in range(horizon - 1):
        # d_{t+1}(s') = sum_{s, a} d_t(s) * pi(a|s) * P(s'|s, a)
        found.append(torch.einsum("s,sa,saz->z", found[-1], probs, lake.P))
    return torch.stack(found)


def optimal_values(lake: Lake, gamma: float, horizon: int | None = None) -> tuple[Tensor, Tensor]:
    """V* (S,) and Q* (S, 4): of horizon steps to go, or to the end of time (value iteration)."""
    values = torch.zeros_like(lake.r[:, 0])
    for _ in range(horizon or 1_000_000):
        # V*(s) = max_a r + gamma * P V*
        before, values = values, (lake.r + gamma * lake.P @ values).amax(dim=1)
        if horizon is None and (values - before).abs().max() < 1e-14:
            break
    return values, lake.r + gamma * lake.P @ values


def policy_values(lake: Lake, probs: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """V_pi (S,) and Q_pi (S, 4) without a step limit: the Bellman equation solved."""
    # (I - gamma * P_pi) V = r_pi
    transitions = torch.einsum("sa,saz->sz", probs, lake.P)
    system = torch.eye(len(probs), dtype=torch.float64) - gamma * transitions
    values = torch.linalg.solve(system, (probs * lake.r).sum(dim=1))
    return values, lake.r + gamma * lake.P @ values


# ======== 3  Networks: a table, or the CNN of frozen_lake_ppo_grpo.py =============================


class Table(nn.Module):
    """theta (S, 4), zeros at first: the uniform policy."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(cells, 4, dtype=torch.float64))

    def forward(self, _: Tensor) -> Tensor:
        return self.theta


def conv_net(planes: int, height: int, width: int, features: int, outputs: int) -> nn.Module:
    """The article's network: two (3x3 convolution, ReLU, 2x2 max-pool), two linear layers."""
    return nn.Sequential(  # (R, C + 1, H, W) -> (R, outputs): logits, or V
        nn.Conv2d(planes, features, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(features, features, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, outputs),
    )


def observe(lake: Lake) -> Tensor:
    """(S, 5, rows, columns): planes of S, F, H, G tiles, and where the agent is."""
    # differs: one map, all its cells
    tiles = np.array([list(row) for row in lake.rows])
    planes = torch.tensor(np.stack([tiles == tile for tile in "SFHG"]), dtype=torch.float64)
    agent = torch.eye(tiles.size, dtype=torch.float64).view(-1, 1, *tiles.shape)
    return torch.cat([planes.expand(len(agent), -1, -1, -1), agent], dim=1)


def ascend(
    policy: nn.Module, lake: Lake, inputs: Tensor, args: argparse.Namespace, goal: float
) -> None:
    """Adam on the exact J until it reaches goal.

    On slippery ice a CNN needs an entropy bonus even so: without it all cells take one action in
    the end, though no gradient has any noise.
    """
    rate, bonus = (0.1, 0.0) if args.policy == "tabular" else (1e-3, 0.05)
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    for _ in range(5000):
        log_probs = policy(inputs).log_softmax(dim=1)
        value = exact_return(lake, log_probs.exp(), args.gamma, args.max_episode_steps)
        if value >= goal:
            break
        objective = value + bonus * categorical_entropy(log_probs)[lake.live].mean()
        optimizer.zero_grad()
        (-objective).backward()
        optimizer.step()


# ======== 4  Rollout: the policy is frozen ========================================================


@dataclass
class Batch:
    """N = M * E episodes of T steps: M batches of E = B * G. After an end: mask False, reward 0."""

    cells: Tensor  # (N, T) long
    actions: Tensor  # (N, T) long
    rewards: Tensor  # (N, T) float64
    terminated: Tensor  # (N, T) bool
    truncated: Tensor  # (N, T) bool: the step limit
    mask: Tensor  # (N, T) bool: the episode was on
    next_cells: Tensor  # (N, T) long


@torch.no_grad()
def sample_batch(
    lake: Lake, probs: Tensor, episodes: int, horizon: int, generator: torch.Generator
) -> Batch:
    """Episodes from the start, under probs (S, 4), until the end or the limit."""
    # differs: one map
    cell = torch.full((episodes,), lake.start)
    alive = torch.ones(episodes, dtype=torch.bool)
    steps = []
    for t in range(horizon):
        action = torch.multinomial(probs[cell], 1, generator=generator).squeeze(1)
        outcome = torch.multinomial(lake.prob[cell, action], 1, generator=generator).squeeze(1)
        picked = (cell, action, outcome)
        terminated = lake.terminated[picked] & alive
        truncated = alive & ~terminated & (t == horizon - 1)
        following = lake.next_cell[picked]
        reward = lake.reward[picked] * alive
        steps.append((cell, action, reward, terminated, truncated, alive, following))
        cell, alive = torch.where(alive, following, cell), alive & ~terminated
        if not alive.any():
            break
    return Batch(*(torch.stack(x, dim=1) for x in zip(*steps, strict=True)))


# ======== 5  Estimators: what each maximises in logp, and its gradient ============================


@dataclass
class Sample:
    """M batches, and what the estimators may read of them."""

    batch: Batch
    num: int  # M
    shape: tuple[int, int]  # of the scores: (M * B, G)
    logp_old: Tensor  # (N, T)
    log_ref: Tensor  # (N, T) of the reference policy, for the KL terms
    values: Tensor  # (N, T) exact V_t(s_t)
    next_values: Tensor  # (N, T)
    learned: Tensor  # (N, T) V(s_t) as the batch before would have learned it
    next_learned: Tensor  # (N, T)

    def split(self, x: Tensor) -> Tensor:
        """(N, ...) -> (M, E, ...)."""
        return x.unflatten(0, (self.num, -1))

    def scores(self, gamma: float) -> Tensor:
        """(M * B, G) returns, in their groups."""
        return discounted_return(self.batch.rewards, gamma).view(self.shape)


def learn_values(batch: Batch, returns: Tensor, num: int, cells: int) -> Tensor:
    """(M, S) mean return of each cell's visits in a batch, at any step: a critic without time."""
    owner = torch.arange(num).repeat_interleave(len(returns) // num)[:, None] * cells
    index = (owner + batch.cells)[batch.mask]
    total = torch.bincount(index, weights=returns[batch.mask], minlength=num * cells)
    count = torch.bincount(index, minlength=num * cells).clamp(min=1)
    return (total / count).view(num, cells)


def prepare(lake: Lake, batch: Batch, log_probs: Tensor, args: argparse.Namespace) -> Sample:
    """What the estimators read: log-probabilities, and V at each step."""
    num = len(batch.cells) // (args.num_groups * args.group_size)
    exact, _ = exact_values(lake, log_probs.exp(), args.gamma, args.max_episode_steps)
    steps = torch.arange(batch.cells.shape[1])
    returns = compute_reinforce(batch.rewards, args.gamma)
    critic = learn_values(batch, returns, num, len(lake.live)).roll(1, dims=0)  # of another batch
    owner = torch.arange(num).repeat_interleave(len(returns) // num)[:, None]
    return Sample(
        batch,
        num,
        (num * args.num_groups, args.group_size),
        log_probs[batch.cells, batch.actions],
        reference(len(lake.live))[batch.cells, batch.actions],
        exact[steps, batch.cells],
        exact[steps + 1, batch.next_cells],
        critic[owner, batch.cells],
        critic[owner, batch.next_cells],
    )


def reference(cells: int) -> Tensor:
    """(S, 4) log-probabilities of the reference of the KL terms: random, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(cells, 4, generator=generator, dtype=torch.float64).log_softmax(dim=1)


def td_inputs(x: Sample, learned: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = (x.learned, x.next_learned) if learned else (x.values, x.next_values)
    return x.batch.rewards, *values, x.batch.terminated


def compute_phi(name: str, x: Sample, args: argparse.Namespace) -> Tensor:
    """(N, T) the weight Phi_t of grad log pi, by the other scripts' functions."""
    batch, gamma = x.batch, args.gamma
    returns = compute_reinforce(batch.rewards, gamma)
    name, _, variant = name.partition(":")
    inputs = td_inputs(x, variant == "learned")
    if name == "vanilla":
        return compute_vanilla(batch.rewards, gamma)
    if name == "reinforce":
        return returns
    if name == "trajectory_mean":
        return compute_baseline(returns, returns, batch.mask, name)
    if name == "batch_time_mean":  # each batch has its own
        parts = [
            compute_baseline(r, r, m, name)
            for r, m in zip(x.split(returns), x.split(batch.mask), strict=True)
        ]
        return torch.cat(parts)
    if name == "value":
        return compute_baseline(returns, inputs[1], batch.mask, name)
    if name == "actor_critic":
        return compute_td(*inputs, gamma)
    if name == "nstep":
        return compute_nstep(*inputs, batch.truncated, gamma, args.n_steps)
    if name in ("gae", "ppo"):
        return compute_gae(*inputs, batch.truncated, gamma, args.lam)
    scores = x.scores(gamma)  # (M * B, G)
    if name == "rloo":
        advantages = compute_rloo(scores)
    elif variant == "batch":
        advantages = torch.cat([compute_grpo(s, variant) for s in scores.chunk(x.num)])
    else:
        advantages = compute_grpo(scores, variant or "none")
    return advantages.view(-1, 1).expand_as(returns)


PAIRS = {"linear": pairwise_linear, "logistic": pairwise_logistic}


def objective(name: str, x: Sample, logp: Tensor, args: argparse.Namespace) -> Tensor:
    """(M,) what an estimator maximises in each batch, as a function of logp (N, T)."""
    mask = x.batch.mask
    kind, _, detail = name.partition(":")
    if kind == "pairwise":  # R is 0 or 1; T = 1
        form, _, mean = detail.partition("_")
        log_ratio = logp - x.logp_old
        if mean:  # the article's weight: log of the mean ratio of the episode's own steps
            log_weights = log_ratio.masked_fill(~mask, -math.inf).logsumexp(dim=1)
            log_weights = log_weights - mask.sum(dim=1).log()
        else:  # the true one: the product of the ratios
            log_weights = (log_ratio * mask).sum(dim=1)
        one, scores = torch.ones(1, dtype=logp.dtype), x.scores(args.gamma)
        loss = PAIRS[form](log_weights.view(x.shape), scores, one)  # (M * B,)
        return -loss.view(x.num, -1).mean(dim=1)
    if kind == "loss_type":
        per_step = compute_phi("grpo", x, args) * logp
        parts = zip(x.split(per_step), x.split(mask), strict=True)
        limit = args.max_episode_steps
        return torch.stack([aggregate(p, m, detail, limit) for p, m in parts])
    if kind == "ppo":
        phi, epsilon = compute_phi(name, x, args), args.clip_epsilon
        per_step = clipped_surrogate((logp - x.logp_old).exp(), phi, epsilon, epsilon)
    elif kind.startswith("k"):  # KL terms, to be minimised; compared with the KL's gradient
        k = {
            "k1": logp - x.log_ref,
            "k2": 0.5 * (logp - x.log_ref).square(),
            "k3": kl_k3(logp, x.log_ref),
        }[kind]
        if detail == "reward":
            k = compute_reinforce(k.detach() * mask, 1.0) * logp
        per_step = k
    else:
        phi = compute_phi(name, x, args).masked_fill(~mask, 0.0)
        per_step = phi * logp
    # 1/E * sum over episodes of sum_t Phi_t * log pi(a_t|s_t)
    return x.split(per_step.masked_fill(~mask, 0.0).sum(dim=1)).mean(dim=1)


def gradients(name: str, x: Sample, logits: Tensor, args: argparse.Namespace) -> Tensor:
    """(M, S * 4) gradient in the logits of each batch; for ppo the mean step of its passes."""
    leaf = logits.expand(x.num, -1, -1)
    passes = args.update_epochs if name == "ppo" else 1
    owner = torch.arange(x.num).repeat_interleave(len(x.batch.cells) // x.num)[:, None]
    for _ in range(passes):
        leaf = leaf.detach().requires_grad_()
        logp = leaf.log_softmax(dim=2)[owner, x.batch.cells, x.batch.actions]  # (N, T)
        (gradient,) = torch.autograd.grad(objective(name, x, logp, args).sum(), leaf)
        leaf = leaf + args.inner_rate * gradient
    if name == "ppo":
        gradient = (leaf.detach() - logits) / (args.inner_rate * passes)
    return gradient.flatten(1)


PLAIN = ["vanilla", "reinforce", "trajectory_mean", "batch_time_mean", "value", "value:learned"]
CRITICS = [f"{k}{v}" for k in ("actor_critic", "nstep", "gae") for v in ("", ":learned")]
GROUPS = ["grpo:group", "grpo:batch", "grpo:none", "rloo"]
LOSSES = ["loss_type:bnpo", "loss_type:grpo", "loss_type:dr_grpo"]
PAIRWISE = [f"pairwise:{form}{w}" for form in ("linear", "logistic") for w in ("", "_mean")]
KL = [f"{k}:{where}" for where in ("loss", "reward") for k in ("k1", "k2", "k3")]
ESTIMATORS = [*PLAIN, *CRITICS, "ppo", *GROUPS, *LOSSES, *PAIRWISE, *KL]


# ======== 6  Statistics: scale, direction and noise, each with its standard error =================


NAMES = ("scale", "off2", "noise", "cosine")


def describe(samples: Tensor, truth: Tensor, blocks: int = 50) -> dict[str, float]:
    """Of gradients (M, D) against the true one (D,): see measures(); *_se by a block jackknife.

    off is the root of off2, a sine; its error comes from that of off2, for a root has none at 0.
    """
    blocks = min(blocks, len(samples) // 2)
    along = samples @ (truth / truth.norm())  # (M,)
    cosine = along / samples.norm(dim=1).clamp(min=1e-300)
    columns = torch.stack([samples.square().sum(dim=1), along.square(), cosine], dim=1)  # (M, 3)
    total, sums = samples.sum(dim=0), columns.sum(dim=0)
    found, without = measures(len(samples), total, sums, truth), []
    for s, c in zip(samples.tensor_split(blocks), columns.tensor_split(blocks), strict=True):
        number = len(samples) - len(s)
        without.append(measures(number, total - s.sum(dim=0), sums - c.sum(dim=0), truth))
    left_out = torch.stack(without)  # (blocks, 4)
    error = ((left_out - left_out.mean(dim=0)).square().mean(dim=0) * (blocks - 1)).sqrt()
    row = dict(zip(NAMES, found.tolist(), strict=True))
    row |= {f"{name}_se": value for name, value in zip(NAMES, error.tolist(), strict=True)}
    row["off"] = max(row["off2"], 0.0) ** 0.5
    row["off_se"] = row["off2_se"] / (2 * max(row["off"], row["off2_se"] ** 0.5, 1e-300))
    return row


def measures(number: int, total: Tensor, columns: Tensor, truth: Tensor) -> Tensor:
    """(4,) from sums over M gradients g: of g (D,), and of |g|^2, (g . u)^2, cos(g, true g)."""
    squares, along, cosine = columns
    along_total = total @ (truth / truth.norm())
    # the square of a mean, free of the noise in it: E[x]^2 = (sum(x)^2 - sum(x^2)) / (M (M - 1))
    pairs, power = number * (number - 1), squares / number
    raw = (total @ total - squares) / pairs
    signal = torch.maximum(raw, 1e-12 * power).clamp(min=1e-300)  # lost in noise: finite, still
    off = raw - (along_total**2 - along) / pairs  # below 0: less than the noise in it
    variance = (power - signal).clamp(min=0)
    return torch.stack(
        [
            along_total / number / truth.norm(),  # scale: 1 for an unbiased estimator
            off / signal,  # off2: squared sine of the angle of its mean to the truth
            (variance / signal).sqrt(),  # noise to signal, of one batch
            cosine / number,  # mean cosine of one batch with the truth
        ]
    )


# ======== 7  Measuring, and what is shown of it ===================================================

SCRIPT = "policy_gradient_oracle"
POINTS = {"start": 0.0, "half": 0.5, "trained": 0.9}  # J as a share of the highest
CHUNK = 50  # batches sampled at a time


def make_policy(args: argparse.Namespace) -> tuple[Lake, nn.Module, Tensor]:
    """The map, the policy as it starts, and its inputs."""
    torch.manual_seed(args.seed)
    lake = build_lake(tuple(args.map.split("/")), args.frozen_lake_slippery)
    inputs = observe(lake)
    if args.policy == "tabular":
        return lake, Table(len(lake.live)), inputs
    height, width = inputs.shape[2:]
    return lake, conv_net(5, height, width, 32, 4).double(), inputs


def metric(policy: nn.Module, inputs: Tensor) -> Tensor:
    """(D, D) square root of the logits' kernel J J': it gives gradients in the logits the lengths
    and angles of those in the parameters. The identity for a table.
    """
    if isinstance(policy, Table):
        return torch.eye(policy.theta.numel(), dtype=torch.float64)
    weights, rows = list(policy.parameters()), []
    for logit in policy(inputs).flatten():
        parts = torch.autograd.grad(logit, weights, retain_graph=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    jacobian = torch.stack(rows)  # (D, parameters)
    values, vectors = torch.linalg.eigh(jacobian @ jacobian.T)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def true_gradients(lake: Lake, logits: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(D,) gradient of J, and of the episodes' KL to the reference, in the logits."""
    leaf = logits.detach().requires_grad_()
    log_probs, horizon = leaf.log_softmax(dim=1), args.max_episode_steps
    (of_return,) = torch.autograd.grad(
        exact_return(lake, log_probs.exp(), args.gamma, horizon), leaf, retain_graph=True
    )
    ref = reference(len(lake.live))
    (of_kl,) = torch.autograd.grad(exact_kl(lake, log_probs, ref, horizon), leaf)
    return of_return.flatten(), of_kl.flatten()


def measure(lake: Lake, policy: nn.Module, inputs: Tensor, args: argparse.Namespace, bar) -> dict:
    """Every estimator of args at one policy: {name: describe()}, and what the policy is."""
    with torch.no_grad():
        logits = policy(inputs).detach()
    log_probs, root = logits.log_softmax(dim=1), metric(policy, inputs)
    of_return, of_kl = true_gradients(lake, logits, args)
    generator = torch.Generator().manual_seed(args.seed)
    found: dict[str, list[Tensor]] = {name: [] for name in args.estimators}
    flat = []
    for part in range(chunks := -(-args.batches // CHUNK)):  # of equal size, never a single batch
        num = args.batches * (part + 1) // chunks - args.batches * part // chunks
        episodes = num * args.num_groups * args.group_size
        horizon = args.max_episode_steps
        batch = sample_batch(lake, log_probs.exp(), episodes, horizon, generator)
        x = prepare(lake, batch, log_probs, args)
        for name in args.estimators:
            found[name].append(gradients(name, x, logits, args) @ root)
        flat.append(flat_groups(x.scores(args.gamma)).double())
        bar.update(num)
    share = torch.cat(flat)
    return {
        "return": exact_return(lake, log_probs.exp(), args.gamma, args.max_episode_steps).item(),
        "success": exact_return(lake, log_probs.exp(), 1.0, args.max_episode_steps).item(),
        "gradient_norm": (of_return @ root).norm().item(),
        "flat": share.mean().item(),
        "flat_se": (share.std() / len(share) ** 0.5).item(),
        "estimators": {
            name: describe(torch.cat(parts), (of_kl if name in KL else of_return) @ root)
            for name, parts in found.items()
        },
    }


def run(args: argparse.Namespace) -> dict:
    """Measure as parse_args() says. Returns {point: measure()} and the run folder."""
    began = time.perf_counter()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    lake, policy, inputs = make_policy(args)
    best = optimal_values(lake, args.gamma, args.max_episode_steps)[0][lake.start].item()
    if best == 0:
        reachable = optimal_values(lake, 1.0)[0][lake.start] > 0
        flag = "gamma" if args.gamma == 0 else "max_episode_steps" if reachable else "map"
        raise ValueError(f"argument --{flag}: no reward can be had, so there is no gradient")
    folder = new_folder(Path(args.output_dir) / SCRIPT, args.run_name)
    writer, rows = open_run(folder, args, 0)
    results: dict = {"best": best, "points": {}, "run_dir": str(folder)}
    total = args.batches * len(args.points)
    with tqdm(total=total, desc=folder.name, unit=" batches", disable=args.quiet or None) as bar:
        for step, point in enumerate(args.points):
            ascend(policy, lake, inputs, args, POINTS[point] * best)
            found = measure(lake, policy, inputs, args, bar)
            results["points"][point] = found
            writer.add_text("table", markdown(point, found, best, args.batches), step)
            for name, row in found["estimators"].items():
                for key, value in row.items():
                    if not key.endswith("_se"):
                        writer.add_scalar(f"{key}/{name}", value, step)
                rows.write(json.dumps({"step": step, "point": point, "estimator": name} | row))
                rows.write("\n")
    add_figures(writer, results["points"], args)
    writer.close()
    rows.close()
    text = json.dumps(results, indent=1) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")
    return results | {"seconds": time.perf_counter() - began}


def add_figures(writer, points: dict, args: argparse.Namespace) -> None:
    """Bias against noise, and flat groups against J, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    for point, found in points.items():
        figure = Figure(figsize=(8, 6), layout="constrained")
        axes = figure.subplots()
        for name, row in found["estimators"].items():
            if name not in KL:
                axes.semilogy(row["off"], row["noise"], "o")
                axes.annotate(name, (row["off"], row["noise"]), fontsize=8)
        axes.set(
            xlabel="off: sine of the angle of its mean to the truth",
            ylabel="noise to signal of one batch",
        )
        writer.add_figure(f"bias_and_noise/{point}", figure)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes, j = figure.subplots(), torch.linspace(0, 1, 101)
    axes.plot(j, (1 - j) ** args.group_size + j**args.group_size, label="(1 - J)^G + J^G")
    axes.plot([p["success"] for p in points.values()], [p["flat"] for p in points.values()], "o")
    axes.set(xlabel="J, not discounted", ylabel="share of flat groups")
    axes.legend()
    writer.add_figure("flat_groups", figure)


COLUMNS = {"scale": 3, "off": 2, "noise": 2, "cosine": 3}


def cell(row: dict[str, float], key: str, batches: int) -> str:
    """A number and its error. -: the mean is lost in noise. <: 0 is not ruled out."""
    if key in ("off", "noise") and not 0 < row["noise"] < 0.5 * batches**0.5:
        return "-"
    if key == "off" and row["off2"] < 2 * row["off2_se"]:
        return f"< {math.sqrt(max(row['off2'], 0) + 2 * row['off2_se']):.2f}"
    return f"{row[key]:.{COLUMNS[key]}f} ± {row[f'{key}_se']:.{COLUMNS[key]}f}"


def markdown(point: str, found: dict, best: float, batches: int) -> str:
    """The table of one policy."""
    lines = [f"{point}: J {found['return']:.4f} of {best:.4f}, flat groups {found['flat']:.1%}", ""]
    head = [f"{'estimator':22}", *(f"{name:>15}" for name in COLUMNS)]
    lines += ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name, row in found["estimators"].items():
        cells = [f"{cell(row, key, batches):>15}" for key in COLUMNS]
        lines.append(f"| {name:22} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def new_folder(parent: Path, name: str) -> Path:
    """Make parent/name, or name-2, name-3, ...: a run is never overwritten."""
    folder, k = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            k += 1
            folder = parent / f"{name}-{k}"


def open_run(folder: Path, args: argparse.Namespace, step: int) -> tuple:
    """Write config.json; open TensorBoard and metrics.jsonl, less what was logged after step."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import, so only where it is used

    head = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    git = shutil.which("git") and subprocess.run(head, capture_output=True, text=True)
    config = vars(args) | {
        "git_commit": git.stdout.strip() if git and git.returncode == 0 else None,
        "torch": torch.__version__,
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    path = folder / "metrics.jsonl"
    old = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [row for row in old if row.endswith("}\n") and json.loads(row)["step"] <= step]
    path.write_text("".join(kept), encoding="utf-8")
    return SummaryWriter(str(folder), purge_step=step + 1), path.open("a", encoding="utf-8")


# ======== 8  Command line =========================================================================


def show_values(args: argparse.Namespace) -> None:
    """V, Q and A of the policies, V*, Q* and the greedy policy, without a step limit."""
    lake, policy, inputs = make_policy(args)
    best = optimal_values(lake, args.gamma, args.max_episode_steps)[0][lake.start].item()
    width, tiles = len(lake.rows[0]), "".join(lake.rows)

    def grid(title: str, cells: list[str]) -> None:
        print(f"\n{title}")
        for first in range(0, len(cells), width):
            print("  " + " ".join(cells[first : first + width]))

    def lines(title: str, table: Tensor) -> None:
        print(f"\n{title}: row, column; left, down, right, up")
        for s in lake.live.nonzero().flatten().tolist():
            print(f"  {s // width}, {s % width}  " + " ".join(f"{q:8.4f}" for q in table[s]))

    def numbers(values: Tensor) -> list[str]:
        pairs = zip(tiles, values.tolist(), strict=True)
        return [f"{v:6.4f}" if tile in "SF" else f"{tile:^6}" for tile, v in pairs]

    for point in args.points:
        ascend(policy, lake, inputs, args, POINTS[point] * best)
        with torch.no_grad():
            probs = policy(inputs).softmax(dim=1)
        values, table = policy_values(lake, probs, args.gamma)
        residual = (values - (probs * (lake.r + args.gamma * lake.P @ values)).sum(dim=1)).abs()
        grid(f"V_pi of the policy {point!r}", numbers(values))
        lines("Q_pi", table)
        lines("A_pi = Q_pi - V_pi", table - values[:, None])
        print(f"\nBellman residual max |V - sum_a pi (r + gamma P V)|: {residual.max():.1e}")
    values, table = optimal_values(lake, args.gamma)
    residual = (values - (lake.r + args.gamma * lake.P @ values).amax(dim=1)).abs()
    grid("V*", numbers(values))
    lines("Q*", table)
    # of equally good actions (gamma 1, no ice) the one that gets there sooner
    _, sooner = optimal_values(lake, min(args.gamma, 0.9999))
    equal = table > table.amax(dim=1, keepdim=True) - 1e-9
    arrows = ["←↓→↑"[a] for a in sooner.masked_fill(~equal, -1.0).argmax(dim=1).tolist()]
    grid(
        "the greedy policy of Q*",
        [a if t in "SF" else t for a, t in zip(arrows, tiles, strict=True)],
    )
    print(f"\nBellman residual max |V* - max_a (r + gamma P V*)|: {residual.max():.1e}")


def number(kind: type, low: float, high: float = math.inf):
    """An argparse type: a number of this kind in low..high."""

    def parse(text: str) -> float:
        if not low <= (value := kind(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low}..{high}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number at all
    return parse


def lake_map(text: str) -> str:
    """An argparse type: random, the name of one of gymnasium's maps, or rows joined by /."""
    # differs: a table takes any size
    if text == "random" or text in MAPS:
        return "/".join(MAPS.get(text, [text]))
    rows = text.upper().split("/")
    tiles = "".join(rows)
    if set(tiles) - set("SFHG"):
        problem = f"give random, {', '.join(MAPS)}, or rows of S, F, H, G joined by /"
    elif len({len(row) for row in rows}) > 1:
        problem = f"the rows have {[len(row) for row in rows]} cells; make them equally long"
    elif tiles.count("S") != 1 or "G" not in tiles:
        problem = "a map has one S and at least one G"
    else:
        return "/".join(rows)
    raise argparse.ArgumentTypeError(f"{text}: {problem}")


def build_parser() -> argparse.ArgumentParser:
    about, formatter = (__doc__ or "").splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [--flag value ...]; --help lists all flags"
    parser = argparse.ArgumentParser(usage=usage, description=about, formatter_class=formatter)
    # differs: nothing is trained
    positive, unit = number(int, 1), number(float, 0, 1)
    switch: dict = {"action": argparse.BooleanOptionalAction, "default": False}

    # fmt: off
    flag = parser.add_argument_group("run").add_argument
    flag("--seed", type=number(int, 0, 2**31 - 1), default=42,
         help="of the episodes, the CNN and --map random")
    flag("--threads", type=number(int, 0), default=1, help="CPU threads; 0: torch decides")
    flag("--run_name", "--version", help="name of the run; None: policy, map and seed")
    flag("--output_dir", default="runs", help=f"a run goes to OUTPUT_DIR/{SCRIPT}/RUN_NAME")
    flag("--batches", type=number(int, 4), default=2000,
         help="M, batches an estimator sees; four times as many halve the standard errors")
    flag("--estimators", nargs="+", metavar="NAME", default=["all"],
         help="of " + ", ".join(ESTIMATORS) + "; all that begin with it, as gae or k1; or all")
    flag("--show", choices=["gradients", "values"], default="gradients",
         help="measure estimators, or print V, Q and A on the map")
    flag("--quiet", **switch, help="no progress bar, no table")

    flag = parser.add_argument_group("environment and policy").add_argument
    flag("--map", "--map_name", type=lake_map, default="4x4",
         help="gymnasium's 4x4 or 8x8, random, or your own rows: SFFF/FHFH/FFFH/HFFG")
    flag("--frozen_lake_slippery", **switch | {"default": True},
         help="slip sideways two times of three")
    flag("--max_episode_steps", type=number(int, 1, 10_000), default=100,
         help="H, the step limit, 10..1000")
    flag("--policy", choices=["tabular", "cnn"], default="tabular",
         help="softmax of a table, or of the CNN of frozen_lake_ppo_grpo.py")
    flag("--points", nargs="+", choices=[*POINTS], default=[*POINTS],
         help="where: as it starts (a table: uniform), at 50 %% of the best, at 90 %%")

    flag = parser.add_argument_group("estimators").add_argument
    flag("--num_groups", type=positive, default=8, help="B, groups of a batch, 1..64")
    flag("--group_size", type=number(int, 2), default=8, help="G, episodes of a group, 2..64")
    flag("--gamma", type=unit, default=1.0, help="discount, 0.9..1; see the top of the file")
    flag("--lam", type=unit, default=0.95, help="lambda of gae and ppo: 0 TD, 1 Monte Carlo")
    flag("--n_steps", type=positive, default=5, help="n of nstep, 1..100")
    flag("--clip_epsilon", type=number(float, 0), default=0.2,
         help="epsilon of ppo, 0.1..0.3; inf: no clip")
    flag("--update_epochs", type=positive, default=4, help="K, gradient steps of ppo, 1..10")
    flag("--inner_rate", type=number(float, 1e-9, 1e6), default=2.0,
         help="learning rate of these steps, 0.1..10")
    # fmt: on
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags, completed and checked: exit 2 with the flag's name where one can't work."""
    # differs: nothing is trained
    parser = build_parser()
    args = parser.parse_args(argv)
    chosen: list[str] = []
    for given in args.estimators:
        found = [e for e in ESTIMATORS if given in ("all", e, e.partition(":")[0])]
        if not found:
            parser.error(f"argument --estimators: {given} is none of {', '.join(ESTIMATORS)}")
        chosen += found
    args.estimators = list(dict.fromkeys(chosen))
    if "ppo" in args.estimators and args.policy == "cnn":
        if args.estimators != ESTIMATORS:
            parser.error("argument --estimators: ppo's inner steps need --policy tabular")
        args.estimators.remove("ppo")
    rows = args.map.split("/")
    name = "random" if args.map == "random" else f"{len(rows)}x{len(rows[0])}"
    if args.policy == "cnn" and args.map != "random" and min(len(rows), len(rows[0])) < 4:
        parser.error("argument --map: the cnn pools twice, 4x4 is the least")
    if args.map == "random":
        args.map = "/".join(generate_random_map(4, seed=args.seed))
    args.points = [point for point in POINTS if point in args.points]  # J only rises
    if args.run_name is None:
        args.run_name = f"{args.policy}-{name}-seed{args.seed}"
    if args.run_name in ("", "..") or Path(args.run_name).name != args.run_name:
        parser.error("argument --run_name: give the name of one folder, not a path")
    return args


def main(argv: list[str] | None = None) -> int:
    # differs: nothing is trained
    args = parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without arrows
    try:
        if args.show == "values":
            show_values(args)
            return 0
        results = run(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if not args.quiet:
        for point, found in results["points"].items():
            print(markdown(point, found, results["best"], args.batches), end="\n\n")
        run_dir = Path(results["run_dir"])
        episodes = args.batches * args.num_groups * args.group_size * len(args.points)
        print(f"{args.batches:,} batches, {episodes:,} episodes in all, {results['seconds']:.0f} s")
        print(f"logs: {run_dir}    watch: tensorboard --logdir {run_dir.parent.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
