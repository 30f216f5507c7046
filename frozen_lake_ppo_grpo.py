# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.0", "numpy>=1.26",
#     "tensorboard>=2.20", "tqdm>=4.66",
# ]
# ///
"""PPO and GRPO on random FrozenLake maps: a map is a prompt, a walk is an answer.

Article: 通过 Frozen Lake 理解 PPO 与 GRPO
Run:     python frozen_lake_ppo_grpo.py --adv_estimator grpo     (or ppo, rloo; 10 s)
         ends with: solved: 99.1% of the optimum (threshold 99%)
Watch:   tensorboard --logdir runs
Show:    python frozen_lake_ppo_grpo.py --infer runs/frozen_lake_ppo_grpo/NAME/checkpoint-last.pt

Keeps:   GAE; group-normalised and leave-one-out advantages; the clipped surrogate with a ratio per
         step or per episode; k3 KL to a reference; entropy bonus; the article's two CNNs.
Changes: maps follow the seed; the reward sits on the last action; PPO whitens advantages over the
         batch; running out of time bootstraps V(s_T); four passes over a batch, so that the clip
         acts; learning rates fall to 0; tiles are one-hot planes. Why: docs/errata.md.
Left out: minibatches, a shared actor-critic trunk (the article has neither).

symbol     | variable        | shape        | meaning
B, G       | batch_size, ... |              | maps an update (prompts), episodes a map (answers)
E, T       | mask            | (E, T)       | E = B * G episodes, padded to the longest, T steps
S, K       | next_cell, ...  | (B, S, 4, K) | cells of a map; outcomes of an action (slippery: 3)
s_t, a_t   | cells, actions  | (E, T)       | state as map * S + cell; 0 left, 1 down, 2 right, 3 up
r_t        | rewards         | (E, T)       | 1 for the action that reaches the goal, else 0
R          | scores          | (B, G)       | (discounted) return of a whole episode
V(s_t)     | values          | (E, T)       | the critic at s_t; next_values: at s_{t+1}
A_t        | advantages      | (E, T)       | PPO: one a step; GRPO, RLOO: one an episode, repeated
log pi     | logp, logp_old  | (E, T)       | of a_t: now, and when it was sampled
rho_t      | ratio           | (E, T)       | pi(a_t|s_t) / pi_old(a_t|s_t)
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

# ======== 1  The maths: pure functions on tensors =================================================


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


def discounted_return(rewards: Tensor, gamma: float) -> Tensor:
    """(E,) return of rewards (E, T). Below gamma 1, a shorter walk to the goal is worth more."""
    # R = sum_t gamma^t * r_t
    t = torch.arange(rewards.shape[1], dtype=rewards.dtype, device=rewards.device)
    return (rewards * gamma**t).sum(dim=1)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / std, or x / std, over all unmasked entries of the batch (ddof 1); masked: 0.

    Over the batch: whitening each episode erases which one was better (erratum 3).
    """
    kept = x[mask]
    std = kept.std(correction=min(1, kept.numel() - 1))
    std = std.masked_fill(kept.amax() == kept.amin(), 1.0)  # all equal: 0, not rounding
    # NOT IN ARTICLE (nor TRL, which adds the mean back: that turns every 0 into a penalty)
    return (x - kept.mean() if shift_mean else x) / (std + 1e-8) * mask


def importance_ratio(logp: Tensor, logp_old: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """pi / pi_old (E, T); level "sequence": its geometric mean over the episode (GSPO, eq. 7)."""
    log_ratio = (logp - logp_old).masked_fill(~mask, 0.0)  # mask before exp
    if level == "sequence":
        # rho_i = exp(1/|o_i| * sum_t log(pi / pi_old))
        log_ratio = (log_ratio.sum(dim=1) / mask.sum(dim=1))[:, None].expand_as(logp)
    return log_ratio.exp()


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


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension."""
    # H = -sum_a pi(a) * log pi(a)
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """Half the mean squared error of the critic."""
    assert values.shape == returns.shape
    # L_V = 1/2 * E[(V(s_t) - R_t)^2]
    return 0.5 * (values - returns).square().mean()


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns): 1 perfect, 0 no better than a constant."""
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0)


# ======== 2  Environment: gymnasium's own maps and transition tables, stacked =====================

Rows = tuple[str, ...]  # a map: its rows of S start, F ice, H hole, G goal


@dataclass
class Lakes:
    """B maps of one shape, with the physics of gymnasium's `env.unwrapped.P`."""

    maps: list[Rows]
    planes: Tensor  # (B, C, H, W) float: what the tiles are
    start: Tensor  # (B,) long: cell of S
    live: Tensor  # (B, S) bool: cells where the episode goes on (S, F)
    prob: Tensor  # (B, S, 4, K) float64: probability of outcome k of action a
    next_cell: Tensor  # (B, S, 4, K) long
    reward: Tensor  # (B, S, 4, K) float
    terminated: Tensor  # (B, S, 4, K) bool


@lru_cache(maxsize=4096)
def transition_table(rows: Rows, slippery: bool) -> np.ndarray:
    """(S, 4, K, 4) float64: probability, next cell, reward, terminated; read from gymnasium."""
    table = FrozenLakeEnv(desc=list(rows), is_slippery=slippery).P
    ended = [(0.0, 0, 0.0, True)] * 2 if slippery else []  # holes and goals have only one outcome
    outcomes = [[(table[s][a] + ended)[: 1 + len(ended)] for a in range(4)] for s in table]
    return np.array(outcomes, dtype=np.float64)


def build_lakes(maps: list[Rows], slippery: bool, encoding: str, device: torch.device) -> Lakes:
    """Stack maps. Encoding "onehot": planes S, F, H, G; "scalar": the article's S0 G1 F2 H3."""
    tiles = np.array([[list(row) for row in rows] for rows in maps])  # (B, H, W) characters
    if encoding == "onehot":
        planes = np.stack([tiles == tile for tile in "SFHG"], axis=1)
    else:
        planes = sum(k * (tiles == tile) for k, tile in enumerate("SGFH"))[:, None]
    flat = tiles.reshape(len(maps), -1)  # (B, S)
    table = np.stack([transition_table(rows, slippery) for rows in maps])
    exact = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    return Lakes(
        maps=maps,
        planes=torch.as_tensor(planes, dtype=torch.float32, device=device),
        start=torch.as_tensor((flat == "S").argmax(axis=1), device=device),
        live=torch.as_tensor((flat == "S") | (flat == "F"), device=device),
        prob=torch.as_tensor(table[..., 0], dtype=exact, device=device),
        next_cell=torch.as_tensor(table[..., 1], dtype=torch.long, device=device),
        reward=torch.as_tensor(table[..., 2], dtype=torch.float32, device=device),
        terminated=torch.as_tensor(table[..., 3], dtype=torch.bool, device=device),
    )


def draw_maps(rng: np.random.Generator, number: int, size: int, held_out: bool) -> list[Rows]:
    """Seeded random solvable maps. Half of all maps, by checksum, are held out of training."""
    maps: list[Rows] = []
    while len(maps) < number:
        rows = tuple(generate_random_map(size, seed=int(rng.integers(2**31))))
        if (zlib.crc32("".join(rows).encode()) % 2 == 0) == held_out:
            maps.append(rows)
    return maps


def observe(lakes: Lakes, index: Tensor) -> Tensor:
    """Observations (R, C + 1, H, W) at the states index (R,): tile planes and the agent's plane."""
    _, _, height, width = lakes.planes.shape
    num_cells = height * width
    agent = F.one_hot(index % num_cells, num_cells).float().view(-1, 1, height, width)
    observations = torch.cat([lakes.planes[index // num_cells], agent], dim=1)
    return observations.contiguous(memory_format=torch.channels_last)  # convolves 20 % faster


# ======== 3  Networks =============================================================================


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


@torch.no_grad()
def evaluate_cells(network: nn.Module, lakes: Lakes) -> Tensor:
    """The network in every live state: (B * S, outputs); 0 in the others, where nobody acts."""
    index = lakes.live.flatten().nonzero().squeeze(1)
    outputs = torch.cat([network(observe(lakes, part)) for part in index.split(4096)])
    table = outputs.new_zeros(lakes.live.numel(), outputs.shape[1])
    return table.index_copy_(0, index, outputs)


# ======== 4  Rollout: the policy is frozen ========================================================


@dataclass
class Batch:
    """E = B * G episodes, e on map e // G. Beyond an episode's end: mask False, reward 0."""

    cells: Tensor  # (E, T) long: s_t as map * S + cell
    actions: Tensor  # (E, T) long
    next_cells: Tensor  # (E, T) long: s_{t+1}; at the last step the final observation
    rewards: Tensor  # (E, T) float
    terminated: Tensor  # (E, T) bool: in a hole or at the goal
    truncated: Tensor  # (E, T) bool: out of time, still on the ice
    mask: Tensor  # (E, T) bool: the step was taken
    logp_old: Tensor  # (E, T) float


@torch.no_grad()
def sample_batch(
    log_probs: Tensor,
    lakes: Lakes,
    start: Tensor,
    group_size: int,
    max_episode_steps: int,
    generator: torch.Generator,
) -> Batch:
    """Walk group_size episodes on each map, from start (B,), by the policy log_probs (B * S, 4).

    A frozen policy needs evaluating only once per state; then a step is two table look-ups: the
    action by the policy's row, the outcome by gymnasium's.
    """
    num_maps, num_cells, _, num_outcomes = lakes.next_cell.shape
    first = torch.arange(num_maps, device=start.device) * num_cells  # (B,) a map's cell 0
    next_cell = (lakes.next_cell + first[:, None, None, None]).flatten()  # (B*S*4*K,)
    terminated = lakes.terminated.flatten()
    # inverse-CDF sampling: the draw is how many cumulative sums (but the last, 1) u has reached
    action_cdf = log_probs.exp().cumsum(dim=1)[:, :-1].contiguous()  # (B*S, 3)
    outcome_cdf = lakes.prob.cumsum(dim=-1).view(-1, num_outcomes)[:, :-1]  # (B*S*4, K-1)

    cell = (first + start).repeat_interleave(group_size)  # (B,) -> (E,)
    alive = torch.ones_like(cell, dtype=torch.bool)
    steps = []
    for _ in range(max_episode_steps):
        u = torch.rand(len(cell), 2, generator=generator, device=cell.device)
        action = (u[:, :1] >= action_cdf[cell]).sum(dim=1)  # (E,)
        pair = cell * 4 + action
        outcome = pair * num_outcomes
        if num_outcomes > 1:
            outcome = outcome + (u[:, 1:] >= outcome_cdf[pair]).sum(dim=1)
        steps.append((cell, action, outcome, alive))
        cell, alive = next_cell[outcome], alive & ~terminated[outcome]
        if not alive.any():
            break
    cells, actions, outcomes, mask = (torch.stack(x, dim=1) for x in zip(*steps, strict=True))
    truncated = torch.zeros_like(mask)
    truncated[:, -1] = alive  # all the others have ended
    return Batch(
        cells=cells,
        actions=actions,
        next_cells=next_cell[outcomes],
        rewards=lakes.reward.flatten()[outcomes] * mask,
        terminated=terminated[outcomes] & mask,
        truncated=truncated,
        mask=mask,
        logp_old=log_probs[cells, actions],
    )


# ======== 5  Update: the estimators differ in two functions; the loss is one ======================


def prepare_ppo(batch: Batch, value_table: Tensor, args: argparse.Namespace) -> tuple:
    """PPO: a critic and GAE, one advantage a step. Returns (advantages, returns), both (E, T)."""
    values, next_values = value_table[batch.cells], value_table[batch.next_cells]  # (E, T)
    rewards = batch.rewards
    if args.whiten_rewards:
        rewards = whiten(rewards, batch.mask, shift_mean=False)
    ends = batch.terminated, batch.truncated
    advantages = compute_gae(rewards, values, next_values, *ends, args.gamma, args.lam)
    return whiten(advantages, batch.mask), advantages + values


def prepare_grpo(batch: Batch, args: argparse.Namespace) -> Tensor:
    """GRPO, RLOO: an episode's score against its group, repeated at each step: (E, T)."""
    scores = discounted_return(batch.rewards, args.gamma).view(-1, args.group_size)  # (B, G)
    if args.adv_estimator == "rloo":
        advantages = compute_rloo(scores)
    else:
        advantages = compute_grpo(scores, args.scale_rewards)
    return advantages.view(-1, 1) * batch.mask  # (B, G) -> (E, 1) -> (E, T)


def update_model(
    trainer: Trainer, lakes: Lakes, batch: Batch, advantages: Tensor, returns: Tensor | None
) -> dict[str, float]:
    """num_updates_per_batch passes over the batch. Returns metrics, averaged over the passes."""
    args, mask = trainer.args, batch.mask
    low = args.clip_epsilon
    high = low if args.clip_epsilon_high is None else args.clip_epsilon_high
    visited = torch.zeros(lakes.live.numel(), dtype=torch.bool, device=mask.device)  # (B * S,)
    visited[batch.cells[mask]] = True  # R states: only these need a forward pass
    observations = observe(lakes, visited.nonzero().squeeze(1))  # (R, C + 1, H, W)
    where = (visited.cumsum(dim=0) - 1).clamp(min=0)[batch.cells]  # (E, T): row of s_t among the R
    if args.beta > 0:
        with torch.no_grad():
            logp_ref = trainer.reference(observations).log_softmax(dim=1)[where, batch.actions]

    history = []
    for _ in range(args.num_updates_per_batch):
        log_probs = trainer.actor(observations).log_softmax(dim=1)  # (R, 4)
        logp = log_probs[where, batch.actions]  # (E, T)
        entropy = categorical_entropy(log_probs)[where]  # (E, T)
        ratio = importance_ratio(logp, batch.logp_old, mask, args.importance_sampling_level)
        # J = E[surrogate + c_H * entropy - beta * k3], to be maximised. k3 has the value of
        # KL(pi || pi_ref) and the gradient of KL(pi_ref || pi); not multiplied by the ratio
        surrogate = clipped_surrogate(ratio, advantages, low, high)
        objective = surrogate + args.entropy_coef * trainer.annealing() * entropy
        if args.beta > 0:
            objective = objective - args.beta * kl_k3(logp, logp_ref)
        loss = -aggregate(objective, mask, args.loss_type, args.max_episode_steps)
        clipped = (ratio < 1 - low) | (ratio > 1 + high)
        metrics = {
            "policy_loss": -aggregate(surrogate, mask, args.loss_type, args.max_episode_steps),
            "entropy": entropy[mask].mean(),
            "approx_kl": kl_k3(batch.logp_old, logp)[mask].mean(),  # 0 in the first pass
            "clipfrac": clipped[mask].float().mean(),
        }
        if args.beta > 0:
            metrics["kl_ref"] = kl_k3(logp, logp_ref)[mask].mean()
        if returns is not None:
            values = trainer.critic(observations).squeeze(1)[where]  # (R, 1) -> (R,) -> (E, T)
            metrics["value_loss"] = value_loss(values[mask], returns[mask])
            metrics["explained_variance"] = explained_variance(values[mask], returns[mask])
            loss = loss + args.critic_loss_coef * metrics["value_loss"]

        trainer.optimizer.zero_grad()
        loss.backward()
        for group in trainer.optimizer.param_groups:  # actor, critic: each has its own norm
            grad_norm = nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
            metrics.setdefault("grad_norm", grad_norm)
            check_finite(loss=loss, gradient=grad_norm)
        trainer.optimizer.step()
        history.append({f"losses/{name}": value.item() for name, value in metrics.items()})
    return {name: sum(row[name] for row in history) / len(history) for name in history[0]}


def check_finite(**tensors: Tensor) -> None:
    """FloatingPointError with the tensor's name where one is NaN or infinite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise FloatingPointError(f"{name} is NaN or infinite")


# ======== 6  Evaluation: exact, on maps never trained on ==========================================


def success_probability(lakes: Lakes, limit: int, policy: Tensor | None = None) -> Tensor:
    """(B, S): chance to reach the goal in limit steps by policy (B, S, 4); None: by the best."""
    arrive = (lakes.prob * lakes.reward).sum(dim=-1)  # (B, S, 4)
    go_on = (lakes.prob * ~lakes.terminated).unbind(dim=-1)  # K of (B, S, 4)
    cells = [outcome.flatten(1) for outcome in lakes.next_cell.unbind(dim=-1)]  # K of (B, S * 4)
    value = torch.zeros_like(arrive[..., 0])  # (B, S)
    for _ in range(limit):
        # Q_k(s, a) = sum_{s', r} p(s', r | s, a) * (r + V_{k-1}(s'))
        later = (p * value.gather(1, c).view_as(p) for p, c in zip(go_on, cells, strict=True))
        q = arrive + sum(later)
        # V_k(s) = sum_a pi(a|s) * Q_k(s, a), or max_a Q_k(s, a)
        value = q.amax(dim=-1) if policy is None else (policy * q).sum(dim=-1)
    return value


def from_start(value: Tensor, lakes: Lakes) -> float:
    """Values (B, S) at the start cells, averaged over the maps."""
    return value.gather(1, lakes.start[:, None]).mean().item()


def evaluate(actor: nn.Module, lakes: Lakes, limit: int) -> dict[str, float]:
    """Success of the policy as sampled, of its most likely actions, of the best and of chance."""
    logits = evaluate_cells(actor, lakes).view(*lakes.live.shape, 4)  # (B * S, 4) -> (B, S, 4)
    policies = {
        "eval/sampled": logits.softmax(dim=-1),
        "eval/greedy": F.one_hot(logits.argmax(dim=-1), 4),
        "eval/optimum": None,
        "eval/uniform": torch.full_like(logits, 0.25),
    }
    return {k: from_start(success_probability(lakes, limit, v), lakes) for k, v in policies.items()}


# ======== 7  Trainer: state, checkpoints, run folder, loop ========================================

SCRIPT = "frozen_lake_ppo_grpo"


class Trainer:
    """All that a run changes, and one update of it. Making a Trainer writes nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.args, self.device = args, torch.device(auto if args.device == "auto" else args.device)
        self.step, self.env_steps, self.train_seconds = 0, 0, 0.0
        torch.manual_seed(args.seed)
        self.rng = np.random.default_rng(args.seed)  # maps
        self.generator = torch.Generator(self.device).manual_seed(args.seed)  # actions, outcomes
        # all seeds are evaluated on the same unseen maps; --infer shows one by its --seed
        unseen = np.random.default_rng(args.seed if args.infer else 0)
        self.eval_lakes = self.make_lakes(unseen, args.eval_maps, held_out=True)
        shape = network_shape(args)
        self.actor = conv_net(*shape, outputs=4).to(self.device)
        self.parts: dict = {"actor": self.actor}
        groups = [{"params": self.actor.parameters(), "rate": args.actor_learning_rate}]
        if args.adv_estimator == "ppo":
            self.parts["critic"] = self.critic = conv_net(*shape, outputs=1).to(self.device)
            groups += [{"params": self.critic.parameters(), "rate": args.critic_learning_rate}]
        self.parts["optimizer"] = self.optimizer = torch.optim.Adam(groups)
        if args.beta > 0:
            self.parts["reference"] = self.reference = conv_net(*shape, outputs=4).to(self.device)
            weights = self.actor.state_dict()
            if args.reference and not args.resume:  # a resumed run's checkpoint holds it
                weights = load_checkpoint(args.reference)["parts"]["actor"]
            self.reference.load_state_dict(weights)

    def make_lakes(self, rng: np.random.Generator, number: int, held_out: bool) -> Lakes:
        """Random maps; or the fixed one, once if held_out: there is no other to evaluate on."""
        args = self.args
        if args.map == "random":
            maps = draw_maps(rng, number, args.frozen_lake_size, held_out)
        else:
            maps = [tuple(args.map.split("/"))] * (1 if held_out else number)
        return build_lakes(maps, args.frozen_lake_slippery, args.state_encoding, self.device)

    def annealing(self) -> float:
        """Factor of learning rates and entropy bonus: from 1 linearly to 0, or always 1."""
        return 1 - self.step / self.args.max_steps if self.args.anneal else 1.0

    def update(self) -> dict[str, float]:
        """Maps, episodes, advantages, gradient steps. Returns metrics by TensorBoard tag."""
        args = self.args
        lakes = self.make_lakes(self.rng, args.batch_size, held_out=False)
        start = lakes.start  # (B,)
        if args.exploring_starts > 0:  # some groups start on any ice (exploring starts)
            anywhere = torch.multinomial(lakes.live.float(), 1, generator=self.generator)
            u = torch.rand(len(start), generator=self.generator, device=self.device)
            start = torch.where(u < args.exploring_starts, anywhere.squeeze(1), start)
        log_probs = evaluate_cells(self.actor, lakes).log_softmax(dim=1)  # (B * S, 4)
        limit = args.max_episode_steps
        batch = sample_batch(log_probs, lakes, start, args.group_size, limit, self.generator)

        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * self.annealing()
        if args.adv_estimator == "ppo":
            value_table = evaluate_cells(self.critic, lakes).squeeze(1)  # (B * S,)
            advantages, returns = prepare_ppo(batch, value_table, args)
        else:
            advantages, returns = prepare_grpo(batch, args), None
        check_finite(advantages=advantages)
        metrics = update_model(self, lakes, batch, advantages, returns)

        self.step += 1
        self.env_steps += int(batch.mask.sum())
        scores = batch.rewards.sum(dim=1)  # (E,)
        groups = discounted_return(batch.rewards, args.gamma).view(-1, args.group_size)  # (B, G)
        return metrics | {
            "score/mean": scores.mean().item(),
            "score/max": scores.max().item(),
            "score/min": scores.min().item(),
            "group/zero_std_frac": flat_groups(groups).float().mean().item(),
            "group/reward_std": groups.std(dim=1).mean().item(),
            "charts/episodic_return": scores.mean().item(),
            "charts/episodic_length": batch.mask.sum(dim=1).float().mean().item(),
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def save_model(self, path: Path) -> None:
        """Write a checkpoint by way of a temporary file: if that fails, the old one is whole."""
        checkpoint = {
            "script": SCRIPT,
            "config": vars(self.args),
            "counters": (self.step, self.env_steps, self.train_seconds),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "rng": self.rng.bit_generator.state,
            "generators": (self.generator.get_state(), torch.get_rng_state()),
        }
        torch.save(checkpoint, buffer := io.BytesIO())
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(buffer.getbuffer())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def load_model(self, path: str) -> None:
        """Restore everything that save_model wrote."""
        checkpoint = load_checkpoint(path)
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint["parts"][name])
        self.step, self.env_steps, self.train_seconds = checkpoint["counters"]
        self.rng.bit_generator.state = checkpoint["rng"]
        sampler, weights = checkpoint["generators"]
        if sampler.shape == self.generator.get_state().shape:  # else: from another kind of device
            self.generator.set_state(sampler)
        torch.set_rng_state(weights)


def load_checkpoint(path: str) -> dict:
    """A checkpoint of this script. ArgumentTypeError says what is wrong with the file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a missing, damaged or foreign file
        known = isinstance(error, OSError) and error.filename  # missing, no permission, a folder
        reason = error.strerror if known else "damaged or foreign"
        raise argparse.ArgumentTypeError(f"{path} can't be loaded: {reason}") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("script") != SCRIPT:
        raise argparse.ArgumentTypeError(f"{path} is not a checkpoint of {SCRIPT}.py")
    return checkpoint


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


def train(args: argparse.Namespace) -> dict:
    """Train as parse_args() says. Returns the last evaluation, counters and the run folder."""
    began, limit = time.perf_counter(), args.max_episode_steps
    trainer = Trainer(args)
    lakes = trainer.eval_lakes
    if from_start(success_probability(lakes, limit), lakes) == 0:
        flag = "max_episode_steps" if args.map == "random" else "map"
        raise ValueError(f"argument --{flag}: no way to the goal in {limit} steps")
    if args.resume:
        trainer.load_model(args.resume)
        folder = Path(args.resume).parent
    else:
        folder = new_folder(Path(args.output_dir) / SCRIPT, args.run_name)
    writer, rows = open_run(folder, args, trainer.step)
    bar = tqdm(
        total=args.max_steps, initial=trainer.step, desc=folder.name, disable=args.quiet or None
    )

    stop: list[bool] = []

    def on_interrupt(*_: object) -> None:
        if not args.quiet:
            tqdm.write("finishing this update, then saving; Ctrl-C again stops at once")
        stop.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    main_thread = threading.current_thread() is threading.main_thread()  # else no signal comes
    previous = signal.signal(signal.SIGINT, on_interrupt) if main_thread else None
    last, flat, result = False, 0, {}
    try:
        while not last:
            start = time.perf_counter()
            with torch.autograd.set_detect_anomaly(args.detect_anomaly):
                metrics = trainer.update()
            trainer.train_seconds += time.perf_counter() - start
            step, last = trainer.step, trainer.step == args.max_steps or bool(stop)
            metrics["charts/env_steps"] = trainer.env_steps
            metrics["charts/train_seconds"] = trainer.train_seconds
            metrics["charts/SPS"] = trainer.env_steps / trainer.train_seconds
            if last or (args.eval_every and step % args.eval_every == 0):
                result = evaluate(trainer.actor, lakes, limit)
                metrics |= result
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            finite = {name: v if math.isfinite(v) else None for name, v in metrics.items()}
            rows.write(json.dumps({"step": step} | finite) + "\n")
            rows.flush()
            shown = {"score": metrics["score/mean"]} | {k[5:]: v for k, v in result.items()}
            bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()})
            bar.update()
            share, score = metrics["group/zero_std_frac"], metrics["score/mean"]
            hopeless = share > 0.8 and score < 0.1 and args.exploring_starts == 0
            flat += hopeless
            if flat == 20 and hopeless and not args.quiet:
                tqdm.write(
                    f"warning: {share:.0%} of the groups are flat, for the 20th time, success is "
                    f"{score:.1%}: next to nothing to learn from. Try --exploring_starts 0.9"
                )
            if args.save_steps and step % args.save_steps == 0:
                trainer.save_model(folder / f"checkpoint-{step:06d}.pt")
            if last or (args.save_steps and step % args.save_steps == 0):
                trainer.save_model(folder / "checkpoint-last.pt")
        if step == args.max_steps:
            flags = {k: v for k, v in vars(args).items() if v is not None}
            scores = {name.replace("eval", "hparam"): value for name, value in result.items()}
            writer.add_hparams(flags, scores, run_name=".")
            frames, _ = play(trainer.actor, args, lakes, "rgb_array")
            add_gif(writer, "agent/sampled", frames, 250, step)
    except (FloatingPointError, OSError) as error:
        where = f"update {trainer.step + 1}: " if isinstance(error, FloatingPointError) else ""
        raise type(error)(f"{where}{error}; run: {folder}") from error
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, previous)
        bar.close()
        rows.close()
        writer.close()
    return {name[5:]: value for name, value in result.items()} | {
        "step": step,
        "env_steps": trainer.env_steps,
        "train_seconds": trainer.train_seconds,
        "seconds": time.perf_counter() - began,
        "maps": len(set(lakes.maps)),
        "run_dir": str(folder),
        "stopped": step < args.max_steps,
    }


def play(actor: nn.Module, args: argparse.Namespace, lakes: Lakes, render_mode: str) -> tuple:
    """An episode of gymnasium's environment on the first map. Returns (frames, reward)."""
    if render_mode != "human":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draws where there is no screen, too
    probs = evaluate_cells(actor, lakes)[: lakes.live.shape[1]].softmax(dim=1).cpu()  # (S, 4)
    env = gym.make(
        "FrozenLake-v1",
        desc=list(lakes.maps[0]),
        is_slippery=args.frozen_lake_slippery,
        max_episode_steps=args.max_episode_steps,
        render_mode=render_mode,
    )
    generator = torch.Generator().manual_seed(args.seed)
    cell, _ = env.reset(seed=args.seed)
    frames, done = [env.render()], False
    while not done:
        sampled = torch.multinomial(probs[cell], 1, generator=generator)
        action = probs[cell].argmax() if args.greedy else sampled
        cell, reward, terminated, truncated, _ = env.step(int(action))
        frames.append(env.render())
        done = terminated or truncated
    env.close()
    return frames, reward


def gif_bytes(frames: list[np.ndarray], milliseconds: int) -> bytes:
    """Frames (H, W, 3), each shown for milliseconds, as an endless GIF."""
    from PIL import Image

    first, *rest = map(Image.fromarray, frames)
    loop = {"save_all": True, "append_images": rest, "duration": milliseconds, "loop": 0}
    first.save(buffer := io.BytesIO(), "GIF", **loop)
    return buffer.getvalue()


def add_gif(writer, tag: str, frames: list[np.ndarray], milliseconds: int, step: int) -> None:
    """An animated image in TensorBoard (its add_video needs moviepy)."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    height, width, _ = frames[0].shape
    gif = gif_bytes(frames, milliseconds)
    image = Summary.Image(height=height, width=width, encoded_image_string=gif)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def infer(args: argparse.Namespace) -> None:
    """Show a trained agent on a map it was not trained on (or on its one fixed map)."""
    trainer, limit = Trainer(args), args.max_episode_steps
    trainer.actor.load_state_dict(load_checkpoint(args.infer)["parts"]["actor"])
    lakes = trainer.eval_lakes
    actions = evaluate_cells(trainer.actor, lakes).argmax(dim=1).tolist()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without arrows
    print("the map, and the most likely action of each cell:")
    for row, tiles in enumerate(lakes.maps[0]):
        cells = zip(tiles, actions[row * len(tiles) :], strict=False)
        print(f"  {tiles}   {''.join('←↓→↑'[a] if tile in 'SF' else tile for tile, a in cells)}")
    result = evaluate(trainer.actor, lakes, limit)
    print("exact success:", ", ".join(f"{name[5:]} {value:.4f}" for name, value in result.items()))
    mode = "rgb_array" if args.render == "gif" else args.render
    frames, reward = play(trainer.actor, args, lakes, mode)
    if args.render == "ansi":
        print("\n".join(frames))
    if args.render == "gif":
        path = Path(args.infer).with_name(f"episode-seed{args.seed}.gif")
        path.write_bytes(gif_bytes(frames, 250))
        print(f"wrote {path}")
    print(f"the episode {'reached' if reward else 'missed'} the goal, in {len(frames) - 1} steps")


# ======== 8  Command line =========================================================================


def number(kind: type, low: float, high: float = math.inf):
    """An argparse type: a number of this kind in low..high."""

    def parse(text: str) -> float:
        if not low <= (value := kind(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low}..{high}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number at all
    return parse


def device_name(text: str) -> str:
    """An argparse type: auto, or a device that works here."""
    try:
        device = "cpu" if text == "auto" else text
        torch.rand(1, generator=torch.Generator(device), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split(". ")[0].split(", ")[0]
        raise argparse.ArgumentTypeError(f"can't use {text} here: {reason}") from error
    return text


def lake_map(text: str) -> str:
    """An argparse type: random, the name of one of gymnasium's maps, or rows joined by /."""
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
    elif len(rows) < 4 or len(rows[0]) < 4:
        problem = "4x4 is the least, the network pools twice"
    else:
        return "/".join(rows)
    raise argparse.ArgumentTypeError(f"{text}: {problem}")


def checkpoint_path(text: str) -> str:
    """An argparse type: a readable checkpoint of this script."""
    return text if load_checkpoint(text) else ""


def network_shape(args: argparse.Namespace) -> tuple[int, int, int, int]:
    """(planes with the agent's, rows, columns, features)."""
    height = width = args.frozen_lake_size
    if args.map != "random":
        rows = args.map.split("/")
        height, width = len(rows), len(rows[0])
    return 5 if args.state_encoding == "onehot" else 2, height, width, args.feature_size


def build_parser() -> argparse.ArgumentParser:
    about, formatter = (__doc__ or "").splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [--flag value ...]; --help lists all flags"
    parser = argparse.ArgumentParser(usage=usage, description=about, formatter_class=formatter)
    natural, positive = number(int, 0), number(int, 1)
    unit, real = number(float, 0, 1), number(float, 0)
    switch: dict = {"action": argparse.BooleanOptionalAction, "default": False}

    # fmt: off
    flag = parser.add_argument_group("run").add_argument
    flag("--seed", type=number(int, 0, 2**31 - 1), default=42,
         help="of maps, networks and actions; with --infer: which map")
    flag("--device", type=device_name, default="auto", help="auto (CUDA if here), cpu, cuda:N, mps")
    flag("--threads", type=natural, default=1,
         help="CPU threads; small networks gain nothing from more; 0: torch decides")
    flag("--run_name", "--version", help="name of the run; None: estimator, map size and seed")
    flag("--output_dir", default="runs", help=f"a run goes to OUTPUT_DIR/{SCRIPT}/RUN_NAME")
    flag("--max_steps", type=positive, default=300, help="number of updates, 100..2000")
    flag("--save_steps", type=natural, default=100, help="updates per checkpoint; 0: only the last")
    flag("--eval_every", type=natural, default=50, help="updates per evaluation; 0: only the last")
    flag("--eval_maps", type=positive, default=1000, help="unseen maps to evaluate on")
    flag("--resume", type=checkpoint_path, metavar="PATH", help="go on from a checkpoint, exactly")
    flag("--infer", type=checkpoint_path, metavar="PATH", help="show the agent of a checkpoint")
    flag("--render", choices=["ansi", "human", "gif"], default="ansi", help="how --infer shows it")
    flag("--greedy", **switch, help="--infer: most likely actions, not samples")
    flag("--detect_anomaly", **switch, help="torch's search for the origin of a NaN (slow)")
    flag("--quiet", **switch, help="no progress bar, no summary")

    flag = parser.add_argument_group("environment").add_argument
    flag("--frozen_lake_size", type=number(int, 4, 64), default=4,
         help="side of random maps; a --map has its own size")
    flag("--frozen_lake_slippery", **switch, help="slip sideways two times of three")
    flag("--map", "--map_name", type=lake_map, default="random",
         help="random maps, gymnasium's 4x4 or 8x8, or your own rows: SFFF/FHFH/FFFH/HFFG")
    flag("--max_episode_steps", type=positive,
         help="time limit; None: gymnasium's, 100 and for maps from 8x8 on 200")
    flag("--state_encoding", choices=["onehot", "scalar"], default="onehot",
         help="tiles as S, F, H, G planes, or as the article's one plane S0 G1 F2 H3")
    flag("--exploring_starts", type=unit, default=0.0,
         help="share of groups that start on any ice; for large maps, where chance never arrives")

    flag = parser.add_argument_group("algorithm").add_argument
    flag("--adv_estimator", choices=["ppo", "grpo", "rloo"], default="ppo",
         help="A_t by GAE and a critic, by the normalised group, or by leave-one-out")
    flag("--batch_size", type=positive, default=32, help="B, maps an update, 16..128")
    flag("--group_size", type=number(int, 2), default=8, help="G, episodes a map, 4..64")
    flag("--num_updates_per_batch", type=positive, default=4,
         help="passes over a batch, 1..8; with 1 the ratio is 1 and the clip never acts")
    flag("--actor_learning_rate", type=unit, default=2e-3, help="of Adam, 1e-4..3e-3")
    flag("--critic_learning_rate", type=unit, default=2e-3, help="of Adam, 1e-4..3e-3; ppo only")
    flag("--anneal", **switch | {"default": True},
         help="learning rates and entropy_coef fall linearly to 0 at max_steps")
    flag("--max_grad_norm", type=number(float, 1e-6), default=0.5,
         help="clips the gradient of each network, 0.1..1; inf: no clipping")
    flag("--feature_size", type=number(int, 1, 1024), default=32,
         help="channels of the convolutions, 16..128")
    flag("--gamma", type=unit,
         help="discount; None: 0.95 for ppo, 1 for grpo and rloo; below 1 a shorter way is better")
    flag("--lam", type=unit, default=0.95, help="lambda of GAE: 0 TD, 1 Monte Carlo; ppo only")
    flag("--clip_epsilon", type=unit, default=0.2, help="epsilon of the clip, 0.1..0.3")
    flag("--clip_epsilon_high", type=real, help="upper epsilon, DAPO: 0.28; None: clip_epsilon")
    flag("--entropy_coef", type=real, default=0.0,
         help="c_H, weight of the entropy bonus, 0..0.1; see --anneal")
    flag("--critic_loss_coef", type=real, default=1.0, help="weight of the value loss; ppo only")
    flag("--whiten_rewards", **switch, help="divide rewards by their std in the batch; ppo only")
    flag("--scale_rewards", choices=["group", "batch", "none"], default="group",
         help="std that divides A: the group's, the batch's, or none (Dr. GRPO); grpo only")
    flag("--loss_type", choices=["bnpo", "grpo", "dr_grpo"], default="bnpo",
         help="mean over all steps; over each episode, then over episodes; sum / constant length")
    flag("--importance_sampling_level", choices=["token", "sequence"], default="token",
         help="one ratio per step, or one per episode (GSPO)")
    flag("--beta", type=real, default=0.0, help="weight of the k3 KL to the reference, 0..0.1")
    flag("--reference", type=checkpoint_path, metavar="PATH",
         help="checkpoint of the reference policy; None: the initial policy")
    # fmt: on
    return parser


ONLY = {  # what no other estimator reads
    "ppo": ("lam", "critic_learning_rate", "critic_loss_coef", "whiten_rewards"),
    "grpo": ("scale_rewards",),
}
# what the command line may change of a checkpoint's flags
FREE = {"resume", "infer", "device", "threads", "quiet"}
RESUME_FREE = FREE | {"max_steps", "save_steps", "eval_every", "detect_anomaly"}
INFER_FREE = FREE | {"render", "greedy", "seed", "map", "frozen_lake_slippery", "max_episode_steps"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags, completed and checked: exit 2 with the flag's name where one can't work."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.resume and args.infer:
        parser.error("argument --infer: not with --resume")
    if args.resume or args.infer:
        flag, free = ("resume", RESUME_FREE) if args.resume else ("infer", INFER_FREE)
        saved = load_checkpoint(args.resume or args.infer)
        if saved["config"].keys() != vars(args).keys():
            parser.error(f"argument --{flag}: was written by another version of {SCRIPT}.py")
        config = saved["config"] | {"resume": None, "infer": None}
        args = parser.parse_args(argv, argparse.Namespace(**config))  # what is given, on top
        for name, value in config.items():
            if name not in free and getattr(args, name) != value:
                parser.error(f"argument --{name}: the checkpoint has {value}")
        if args.infer:
            args.beta, args.reference, args.eval_maps = 0.0, None, 1
        if args.resume:
            last = Path(args.resume).with_name("checkpoint-last.pt")
            done = saved["counters"][0]
            if last.exists() and load_checkpoint(str(last))["counters"][0] > done:
                parser.error(f"argument --resume: {last} is later; resume it, or copy the folder")
            if args.max_steps <= done:
                parser.error(f"argument --max_steps: {done} updates are done; give more")
    ppo = args.adv_estimator == "ppo"
    if ppo and args.importance_sampling_level == "sequence":
        parser.error("argument --importance_sampling_level: sequence needs a group estimator")
    for estimator, names in ONLY.items():
        for name in names:
            if args.adv_estimator != estimator and getattr(args, name) != parser.get_default(name):
                parser.error(f"argument --{name}: needs --adv_estimator {estimator}")
    size = parser.get_default("frozen_lake_size")
    if args.map != "random" and args.frozen_lake_size != size and not args.infer:
        parser.error("argument --frozen_lake_size: a --map has its own size")
    if args.reference and args.beta == 0:
        parser.error("argument --reference: needs --beta above 0")
    for name in ("infer", "reference"):
        if getattr(args, name) and not args.resume:
            config = load_checkpoint(getattr(args, name))["config"]
            theirs, ours = network_shape(argparse.Namespace(**config)), network_shape(args)
            if theirs != ours:
                what = "(planes, rows, columns, features)"
                parser.error(f"argument --{name}: its network has {what} {theirs}, not {ours}")

    _, height, width, _ = network_shape(args)
    if args.gamma is None:
        args.gamma = 0.95 if ppo else 1.0
    if args.max_episode_steps is None:
        spec = gym.spec("FrozenLake8x8-v1" if max(height, width) >= 8 else "FrozenLake-v1")
        args.max_episode_steps = spec.max_episode_steps
    if args.run_name is None:
        kind = "" if args.map == "random" else "-fixed"
        slippery = "-slippery" if args.frozen_lake_slippery else ""
        args.run_name = f"{args.adv_estimator}-{height}x{width}{kind}{slippery}-seed{args.seed}"
    if args.run_name in ("", "..") or Path(args.run_name).name != args.run_name:
        parser.error("argument --run_name: give the name of one folder, not a path")
    return args


def summary(result: dict, args: argparse.Namespace) -> str:
    """The last lines of a run. On slippery ice the better of sampled and greedy counts."""
    sampled, greedy, optimum = (result[name] for name in ("sampled", "greedy", "optimum"))
    share = (max(sampled, greedy) if args.frozen_lake_slippery else sampled) / optimum
    threshold = 0.95 if args.frozen_lake_slippery else 0.99
    runs, where = Path(result["run_dir"]).parent.parent, "the map"
    if args.map == "random":
        where = f"{args.eval_maps} unseen maps ({result['maps']} different)"
    lines = [
        f"success on {where}: sampled {sampled:.4f}, greedy {greedy:.4f}; "
        f"optimum {optimum:.4f}, uniform policy {result['uniform']:.4f}",
        f"{'solved' if share >= threshold else 'not solved'}: {share:.1%} of the optimum "
        f"(threshold {threshold:.0%})",
        f"{result['step']} updates, {result['env_steps']:,} environment steps, "
        f"{result['train_seconds']:.1f} s of training, {result['seconds']:.1f} s in all",
        f"logs: {result['run_dir']}    watch: tensorboard --logdir {runs}",
    ]
    if args.gamma == 1 and share > 0.9 and greedy < sampled - 0.01:
        lines.append("greedy lags: at gamma 1 a long walk is worth a short one; try --gamma 0.99")
    if result["stopped"]:
        lines.append(f"go on: python {SCRIPT}.py --resume {result['run_dir']}/checkpoint-last.pt")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.infer:
            infer(args)
            return 0
        result = train(args)
    except KeyboardInterrupt:
        print("stopped at once; checkpoints saved before are whole", file=sys.stderr)
        return 130
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if not args.quiet:
        print(summary(result, args))
    return 130 if result["stopped"] else 0


if __name__ == "__main__":
    sys.exit(main())
