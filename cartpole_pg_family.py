# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.0", "numpy>=1.26",
#     "tensorboard>=2.20", "tqdm>=4.66",
# ]
# ///
"""The policy-gradient family on CartPole: one formula, another weight Phi_t for each member.

    grad J = E[ sum_t grad log pi(a_t|s_t) * Phi_t ]

Notes:   07_Reinforcement_Learning, from 原始策略梯度法 to RL GRPO
Run:     python cartpole_pg_family.py --adv_estimator ppo      (1 s of training, 4 s in all)
         ends with: solved after ... environment steps, ...
         python cartpole_pg_family.py --adv_estimator all      (each in turn, 30 s, and a table)
Watch:   tensorboard --logdir runs
Show:    python cartpole_pg_family.py --infer runs/cartpole_pg_family/NAME/checkpoint-last.pt

--adv_estimator | Phi_t                              | learns after
vanilla         | G(tau)                             | whole episodes, one of each environment
reinforce       | G_t                                | "
baseline        | G_t - b                            | "
grpo            | (G(tau) - mean) / std of its group | ", with PPO's clip, several passes
actor_critic    | delta_t                            | every step
nstep           | A_t^(n)                            | num_steps steps
gae             | sum_l (gamma lambda)^l delta_{t+l} | "
ppo             | the same, clipped                  | ", several passes in minibatches

Keeps:   every Phi_t of the notes; V fitted beside the actor; PPO's clip and passes.
Changes: many environments at once; gamma 0.98 to 1, not 0.9; running out of time bootstraps
         V(s_T); advantages normalised for PPO; orthogonal initialisation. Why: docs/errata.md.
Left out: PPO-KL, clipping of the value loss; loss types and KL to a reference are in
         frozen_lake_ppo_grpo.py.

symbol   | variable     | shape         | meaning
N, T     | mask         | (N, T)        | environments; steps of the longest episode, or num_steps
s_t      | observations | (N, T + 1, 4) | position, its speed, angle, its speed; s_{t+1} follows a_t
a_t, r_t | actions, ... | (N, T)        | 0 left, 1 right; 1 for every step
G_t      | returns      | (N, T)        | what came after a_t, discounted; the critic's target
V(s_t)   | values       | (N, T)        | the critic at s_t; next_values: at s_{t+1}
Phi_t    | advantages   | (N, T)        | then (R,): the R rows that are steps (mask)
rho_t    | ratio        | (R,)          | pi(a_t|s_t) / pi_old(a_t|s_t)
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
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

# ======== 1  The maths: Phi_t, in the order of the notes ==========================================


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


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's objective per step, to be maximised (Schulman et al. 2017, eq. 7; high: DAPO)."""
    assert ratio.shape == advantages.shape
    # min(rho * A, clip(rho, 1 - low, 1 + high) * A)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


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


def flat_groups(scores: Tensor) -> Tensor:
    """(B,) bool: all scores equal. No signal; dividing by their std would amplify rounding."""
    return scores.amax(dim=1) == scores.amin(dim=1)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / std, or x / std, over all unmasked entries of the batch (ddof 1); masked: 0.

    Over the batch: whitening each episode erases which one was better (erratum 3).
    """
    kept = x[mask]
    std = kept.std(correction=min(1, kept.numel() - 1))
    std = std.masked_fill(kept.amax() == kept.amin(), 1.0)  # all equal: 0, not rounding
    # NOT IN ARTICLE (nor TRL, which adds the mean back: that turns every 0 into a penalty)
    return (x - kept.mean() if shift_mean else x) / (std + 1e-8) * mask


def kl_k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimates KL(pi || pi_ref) at actions sampled from pi; never negative (Schulman 2020)."""
    # k3 = pi_ref / pi - log(pi_ref / pi) - 1
    log_ratio = logp_ref - logp
    return log_ratio.exp() - log_ratio - 1


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


# ======== 2  Environment: gymnasium's own vector CartPole =========================================


def make_envs(env_id: str, num_envs: int) -> CartPoleVectorEnv:
    """num_envs CartPoles in one. Autoreset is next-step: the row after an end is no transition."""
    envs = gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point").unwrapped
    assert isinstance(envs, CartPoleVectorEnv)
    return envs


def share_starts(envs: CartPoleVectorEnv, group_size: int) -> np.ndarray:
    """Give a group one start, as the answers of a group share their prompt. Returns (N, 4)."""
    state = np.asarray(envs.state)[:, ::group_size].repeat(group_size, axis=1)  # (4, N)
    envs.state = state  # type: ignore[assignment]
    return state.T.astype(np.float32)


# ======== 3  Networks =============================================================================


def mlp(hidden: int, outputs: int, gain: float) -> nn.Module:
    """(R, 4) -> (R, outputs): logits, or V. Orthogonal weights, biases 0 (as in SB3, CleanRL)."""
    sizes = [4, hidden, hidden, outputs]
    linear = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for layer, scale in zip(linear, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


def draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """(N,) actions from softmax of logits (N, A): Gumbel-max, twice as fast as multinomial."""
    # argmax_a(logit_a - log(e_a)), e_a ~ Exp(1)
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log()).argmax(1)


# ======== 4  Rollout: the policy is frozen ========================================================


@dataclass
class Batch:
    """N environments, T steps. Where mask is False nothing was decided: reward 0, no end."""

    observations: Tensor  # (N, T + 1, 4) float
    actions: Tensor  # (N, T) long
    logp_old: Tensor  # (N, T) float
    rewards: Tensor  # (N, T) float
    terminated: Tensor  # (N, T) bool: fell, or left the track
    truncated: Tensor  # (N, T) bool: out of time, still standing
    mask: Tensor  # (N, T) bool: a step of an episode


@torch.no_grad()
def sample_batch(trainer: Trainer) -> Batch:
    """The next num_steps steps of each environment, or (num_steps 0, None) an episode of each."""
    # differs: real environments step here, not a table
    args, device, step = trainer.args, trainer.device, trainer.envs.step
    whole = not args.num_steps
    if whole:
        trainer.start_episodes()
    rows = []
    for _ in range(args.num_steps or trainer.envs.max_episode_steps):
        observation = torch.as_tensor(trainer.observation, device=device)  # (N, 4)
        logits = trainer.actor(observation)  # (N, 2)
        action = draw(logits, trainer.generator)
        mask = ~trainer.ended  # an environment that has ended resets now, whatever the action
        trainer.observation, reward, terminated, truncated, _ = step(action.cpu().numpy())
        reward, terminated = reward * mask, terminated & mask
        truncated = truncated & mask & ~terminated  # a fall in the last step is a fall
        rows.append((observation, logits, action, reward, terminated, truncated, mask))
        done = terminated | truncated
        trainer.count(reward, done)
        trainer.ended = trainer.ended | done if whole else done
        if whole and trainer.ended.all():
            break
    final = torch.as_tensor(trainer.observation, device=device)
    observations, all_logits, all_actions, *rest = zip(*rows, strict=True)
    actions = torch.stack(all_actions, dim=1)  # (N, T)
    log_probs = torch.stack(all_logits, dim=1).log_softmax(dim=2)  # (N, T, 2)
    return Batch(
        torch.stack([*observations, final], dim=1),
        actions,
        log_probs.gather(2, actions[..., None]).squeeze(2),  # (N, T, 1) -> (N, T)
        *(torch.as_tensor(np.stack(x, axis=1), device=device) for x in rest),
    )


# ======== 5  Update: the policy moves =============================================================


def prepare_inputs(args: argparse.Namespace, batch: Batch, values: Tensor | None) -> tuple:
    """Phi_t (N, T), and the critic's target (N, T) or None, from values (N, T + 1) or None."""
    rewards, gamma, kind = batch.rewards, args.gamma, args.adv_estimator
    if kind == "vanilla":
        return compute_vanilla(rewards, gamma), None
    if kind == "grpo":
        scores = discounted_return(rewards, gamma).view(-1, args.group_size)  # (N / G, G)
        return compute_grpo(scores).view(-1, 1).expand_as(rewards), None
    if values is None:
        returns = compute_reinforce(rewards, gamma)
        if kind == "reinforce":
            return returns, None
        return compute_baseline(returns, returns, batch.mask, args.baseline), None

    # next-step autoreset: the next row's observation is where this step led, also at an end
    values, next_values = values[:, :-1], values[:, 1:]
    if kind == "baseline":
        # out of time: V(s_T) stands for the rewards that were cut off
        returns = compute_reinforce(rewards + gamma * next_values * batch.truncated, gamma)
        return compute_baseline(returns, values, batch.mask, "value"), returns
    ends = batch.terminated, batch.truncated
    if kind == "actor_critic":
        advantages = compute_td(rewards, values, next_values, batch.terminated, gamma)
    elif kind == "nstep":
        advantages = compute_nstep(rewards, values, next_values, *ends, gamma, args.n_steps)
    else:
        advantages = compute_gae(rewards, values, next_values, *ends, gamma, args.lam)
    return advantages, advantages + values


def update_model(
    trainer: Trainer, batch: Batch, advantages: Tensor, returns: Tensor | None
) -> None:
    """One gradient step; PPO and GRPO: update_epochs passes, in minibatches."""
    # differs: minibatches, and two forms of the objective
    args, mask = trainer.args, batch.mask
    if args.normalize_advantages == "batch":
        advantages = whiten(advantages, mask)
    observations, actions = batch.observations[:, :-1][mask], batch.actions[mask]  # (R, 4), (R,)
    logp_old, advantages = batch.logp_old[mask], advantages[mask]  # (R,), (R,)
    returns = None if returns is None else returns[mask]
    clips, epsilon = args.adv_estimator in CLIPPED, args.clip_epsilon
    for _ in range(args.update_epochs or 1):
        order = torch.randperm(len(actions), generator=trainer.generator, device=mask.device)
        divergence = []
        for rows in order.split(args.minibatch_size or len(order)):
            phi = advantages[rows]
            if args.normalize_advantages == "minibatch":
                phi = whiten(phi, torch.ones_like(phi, dtype=torch.bool))
            log_probs = trainer.actor(observations[rows]).log_softmax(dim=1)  # (R, 2)
            logp = log_probs.gather(1, actions[rows, None]).squeeze(1)  # (R, 1) -> (R,)
            entropy = categorical_entropy(log_probs).mean()
            metrics = {"losses/entropy": entropy}
            assert logp.shape == phi.shape
            if clips:  # PPO, GRPO: J = E[min(rho * Phi, clip(rho) * Phi)]
                ratio = (logp - logp_old[rows]).exp()
                objective = clipped_surrogate(ratio, phi, epsilon, epsilon).mean()
                with torch.no_grad():
                    divergence.append(kl_k3(logp_old[rows], logp).mean())
                    metrics["losses/approx_kl"] = divergence[-1]
                    metrics["losses/clipfrac"] = ((ratio - 1).abs() > epsilon).float().mean()
            else:  # J = E[log pi(a_t|s_t) * Phi_t]; per step: the sum over an episode, scaled
                objective = (logp * phi).mean()
            metrics["losses/policy_loss"] = -objective
            loss = -(objective + args.entropy_coef * entropy)
            if returns is not None:
                values = trainer.critic(observations[rows]).squeeze(1)  # (R, 1) -> (R,)
                metrics["losses/value_loss"] = value_loss(values, returns[rows])
                loss = loss + metrics["losses/value_loss"]
            trainer.optimizer.zero_grad()
            loss.backward()
            norms = [  # actor, critic: each has its own
                nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
                for group in trainer.optimizer.param_groups
            ]
            check_finite(loss=loss, gradient=torch.stack(norms))
            trainer.optimizer.step()
            metrics["losses/grad_norm"] = norms[0]
            trainer.record(metrics)
        if args.target_kl and torch.stack(divergence).mean() > args.target_kl:
            break


def check_finite(**tensors: Tensor) -> None:
    """FloatingPointError with the tensor's name where one is NaN or infinite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise FloatingPointError(f"{name} is NaN or infinite")


# ======== 6  Evaluation: on starts never trained on ===============================================

UNSEEN = 2**31  # the seed of all evaluations; --seed is below


@torch.no_grad()
def evaluate(
    policy: Callable[[Tensor], Tensor], envs: CartPoleVectorEnv, device, seed: int = UNSEEN
) -> dict[str, float]:
    """Mean return of a policy, observations (R, 4) -> logits (R, 2), in one episode of each env.

    The first half of envs takes the most likely action, the other half samples. Called again, it
    gives the same starts and the same draws.
    """
    # differs: episodes here; exact on FrozenLake
    generator = torch.Generator(device).manual_seed(seed)
    observation, _ = envs.reset(seed=seed)
    half, returns = envs.num_envs // 2, np.zeros(envs.num_envs)
    alive = np.ones(envs.num_envs, dtype=bool)
    while alive.any():
        logits = policy(torch.as_tensor(observation, device=device))
        action = torch.cat([logits[:half].argmax(dim=1), draw(logits[half:], generator)])
        observation, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
        returns += reward * alive
        alive &= ~(terminated | truncated)
    return {"eval/greedy": returns[:half].mean(), "eval/sampled": returns[half:].mean()}


# ======== 7  Trainer: state, checkpoints, run folder, loop ========================================

SCRIPT = "cartpole_pg_family"
LOG_EVERY = 1000  # environment steps from one logged row to the next, or an update where longer


class Trainer:
    """All that a run changes, and one update of it. Making a Trainer writes nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.args, self.device = args, torch.device(auto if args.device == "auto" else args.device)
        self.env_steps, self.updates, self.train_seconds = 0, 0, 0.0
        torch.manual_seed(args.seed)  # networks
        self.generator = torch.Generator(self.device).manual_seed(args.seed)  # actions, minibatches
        self.envs = make_envs(args.env_id, args.num_envs)
        self.observation, _ = self.envs.reset(seed=args.seed)  # (N, 4)
        self.ended = np.zeros(args.num_envs, dtype=bool)  # its last step was an episode's last
        self.running = np.zeros(args.num_envs)  # return of the episode so far
        self.finished: list[float] = []  # returns of episodes since the last logged row
        self.sums: dict[str, tuple[float, int]] = {}  # of metrics since then, and of how many
        self.eval_envs = make_envs(args.env_id, 2 * args.eval_episodes)
        self.actor = mlp(args.hidden_size, 2, gain=0.01).to(self.device)
        self.parts: dict = {"actor": self.actor}
        groups = [{"params": self.actor.parameters(), "rate": args.actor_learning_rate}]
        if has_critic(args):
            self.parts["critic"] = self.critic = mlp(args.hidden_size, 1, 1.0).to(self.device)
            groups += [{"params": self.critic.parameters(), "rate": args.critic_learning_rate}]
        self.optimizer = torch.optim.Adam(groups, eps=1e-5, fused=self.device.type != "mps")
        self.parts["optimizer"] = self.optimizer

    def start_episodes(self) -> None:
        """Begin anew in all environments; for GRPO, a group of them from the same start."""
        self.observation, _ = self.envs.reset()
        if self.args.adv_estimator == "grpo":
            self.observation = share_starts(self.envs, self.args.group_size)
        self.ended, self.running = np.zeros_like(self.ended), np.zeros_like(self.running)

    def count(self, reward: np.ndarray, done: np.ndarray) -> None:
        """Returns of episodes from rewards (N,) and ends (N,) of a step."""
        self.running += reward
        if done.any():
            self.finished += self.running[done].tolist()
            self.running[done] = 0

    def record(self, metrics: dict) -> None:
        """Add metrics to the sums of the row to be logged next."""
        for name, value in metrics.items():
            total, number = self.sums.get(name, (0.0, 0))
            value = value.item() if isinstance(value, Tensor) else value
            self.sums[name] = total + value, number + 1

    def update(self) -> None:
        """Steps of the environments, Phi_t, gradient steps."""
        args = self.args
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * max(0, 1 - self.env_steps / args.max_steps * args.anneal)
        batch, values = sample_batch(self), None
        if has_critic(args):
            with torch.no_grad():
                values = self.critic(batch.observations).squeeze(2)  # (N, T + 1)
        if not batch.mask.any():  # one environment, and it resets
            return
        advantages, returns = prepare_inputs(args, batch, values)
        if args.adv_estimator == "grpo":
            scores = discounted_return(batch.rewards, args.gamma).view(-1, args.group_size)
            flat, std = flat_groups(scores).float().mean(), scores.std(dim=1).mean()
            self.record({"group/zero_std_frac": flat, "group/reward_std": std})
        if values is not None:
            explained = explained_variance(values[:, :-1][batch.mask], returns[batch.mask])
            # all returns equal (one row has no variance): nothing to explain, 0
            self.record({"losses/explained_variance": explained.nan_to_num(0, 0, 0)})
        check_finite(advantages=advantages)
        update_model(self, batch, advantages, returns)
        self.env_steps += int(batch.mask.sum())
        self.updates += 1

    def row(self) -> dict[str, float]:
        """Metrics by TensorBoard tag since the last call."""
        metrics = {name: total / number for name, (total, number) in self.sums.items()} | {
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            "charts/updates": self.updates,
            "charts/train_seconds": self.train_seconds,
            "charts/SPS": self.env_steps / self.train_seconds,
        }
        if self.finished:  # since the last row
            score = np.array(self.finished)
            metrics |= {f"score/{k}": getattr(score, k)() for k in ("mean", "max", "min")}
            metrics["charts/episodic_return"] = score.mean()
            metrics["charts/episodic_length"] = score.mean()  # CartPole: 1 a step
        self.finished, self.sums = [], {}
        return metrics

    def save_model(self, path: Path) -> None:
        """Write a checkpoint by way of a temporary file: if that fails, the old one is whole."""
        envs = self.envs
        arrays = envs.state, envs.steps, envs.prev_done, self.observation, self.ended, self.running
        checkpoint = {
            "script": SCRIPT,
            "config": vars(self.args),
            "counters": (self.env_steps, self.updates, self.train_seconds),
            "pending": (self.finished, self.sums),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "envs": [torch.as_tensor(x) for x in arrays],
            "rng": envs.np_random.bit_generator.state,
            "generators": self.generator.get_state(),
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
        checkpoint, envs = load_checkpoint(path), self.envs
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint["parts"][name])
        self.env_steps, self.updates, self.train_seconds = checkpoint["counters"]
        self.finished, self.sums = checkpoint["pending"]
        arrays = (x.numpy() for x in checkpoint["envs"])
        envs.state, envs.steps, envs.prev_done, self.observation, self.ended, self.running = arrays
        envs.np_random.bit_generator.state = checkpoint["rng"]
        if checkpoint["generators"].shape == self.generator.get_state().shape:  # else: other device
            self.generator.set_state(checkpoint["generators"])


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


def train(args: argparse.Namespace, parent: Path | None = None) -> dict:
    """Train as parse_args() says. Returns the last evaluation, counters and the run folder."""
    # differs: counts environment steps, and stops when solved
    began, trainer = time.perf_counter(), Trainer(args)
    if args.resume:
        trainer.load_model(args.resume)
        folder = Path(args.resume).parent
    else:
        folder = new_folder(parent or Path(args.output_dir) / SCRIPT, args.run_name)
    writer, rows = open_run(folder, args, trainer.env_steps)
    total = None if args.target_return else args.max_steps  # most runs end long before
    progress = {"total": total, "initial": trainer.env_steps, "disable": args.quiet or None}
    bar = tqdm(desc=folder.name, unit=" steps", unit_scale=True, **progress)
    stop: list[bool] = []

    def on_interrupt(*_: object) -> None:
        if not args.quiet:
            tqdm.write("finishing this update, then saving; Ctrl-C again stops at once")
        stop.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def log(metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, trainer.env_steps)
        finite = {name: float(v) if math.isfinite(v) else None for name, v in metrics.items()}
        rows.write(json.dumps({"step": trainer.env_steps} | finite) + "\n")
        rows.flush()

    main_thread = threading.current_thread() is threading.main_thread()  # else no signal comes
    previous = signal.signal(signal.SIGINT, on_interrupt) if main_thread else None
    done = False
    try:
        result = evaluate(trainer.actor, trainer.eval_envs, trainer.device)
        if not args.resume:
            log(result)
        while not (done or stop):
            before, start = trainer.env_steps, time.perf_counter()
            with torch.autograd.set_detect_anomaly(args.detect_anomaly):
                trainer.update()
            trainer.train_seconds += time.perf_counter() - start
            step, metrics = trainer.env_steps, {}
            evaluates, logs, saves = (
                every > 0 and step // every > before // every
                for every in (args.eval_every, LOG_EVERY, args.save_steps)
            )
            done = step >= args.max_steps
            if evaluates or done:
                metrics = result = evaluate(trainer.actor, trainer.eval_envs, trainer.device)
                done |= min(result.values()) >= args.target_return > 0
            if logs or metrics:
                metrics = trainer.row() | metrics
                log(metrics)
                shown = {name: v for name, v in metrics.items() if name == "score/mean"} | result
                bar.set_postfix({name.split("/")[1]: f"{v:.1f}" for name, v in shown.items()})
            bar.update(step - before)
            if saves:
                trainer.save_model(folder / f"checkpoint-{step:06d}.pt")
                trainer.save_model(folder / "checkpoint-last.pt")
        trainer.save_model(folder / "checkpoint-last.pt")
        if done:
            flags = {k: v for k, v in vars(args).items() if v is not None}
            scores = {name.replace("eval", "hparam"): value for name, value in result.items()}
            writer.add_hparams(flags, scores, run_name=".")
            add_gif(writer, "agent/sampled", play(trainer.actor, args, "rgb_array")[0], 80, step)
        else:
            result = evaluate(trainer.actor, trainer.eval_envs, trainer.device)
    except (FloatingPointError, OSError) as error:
        where = f"update {trainer.updates + 1}: " if isinstance(error, FloatingPointError) else ""
        raise type(error)(f"{where}{error}; run: {folder}") from error
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, previous)
        bar.close()
        rows.close()
        writer.close()
    return {name[5:]: float(value) for name, value in result.items()} | {
        "adv_estimator": args.adv_estimator,
        "solved": bool(min(result.values()) >= threshold(args)),
        "env_steps": trainer.env_steps,
        "updates": trainer.updates,
        "train_seconds": trainer.train_seconds,
        "seconds": time.perf_counter() - began,
        "auc": area_under_curve(folder),
        "run_dir": str(folder),
        "stopped": not done,
    }


def area_under_curve(folder: Path, horizon: int = 100_000) -> float:
    """Mean eval/sampled over the first 100,000 environment steps; a run keeps its last value."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    points = {row["step"]: row["eval/sampled"] for row in rows if "eval/sampled" in row}
    return float(np.interp(range(0, horizon, 100), [*points], [*points.values()]).mean())


def train_all(args: argparse.Namespace) -> list[dict]:
    """Every estimator in turn, on one seed, each in a folder of its own inside the run's."""
    folder, results = new_folder(Path(args.output_dir) / SCRIPT, args.run_name), []
    for name in PHI:
        one = argparse.Namespace(**vars(args) | {"adv_estimator": name, "run_name": name})
        results.append(train(complete(one), folder))
        if results[-1]["stopped"]:
            break
    return results


def play(actor: nn.Module, args: argparse.Namespace, render_mode: str | None) -> tuple:
    """An episode of gymnasium's environment. Returns (every fourth frame, return)."""
    # differs: another environment
    if render_mode != "human":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draws where there is no screen, too
    env = gym.make(args.env_id, render_mode=render_mode)
    device = next(actor.parameters()).device
    generator = torch.Generator(device).manual_seed(args.seed)
    observation, _ = env.reset(seed=UNSEEN + args.seed)
    frames, total, done = [], 0.0, False
    while not done:
        if total % 4 == 0 and render_mode == "rgb_array":
            frames.append(np.asarray(env.render())[1::2, ::2])  # odd rows: one is the track
        with torch.no_grad():
            logits = actor(torch.as_tensor(observation, device=device)[None])  # (1, 2)
        action = logits.argmax() if args.greedy else draw(logits, generator)
        observation, reward, terminated, truncated, _ = env.step(int(action))
        total += float(reward)
        done = terminated or truncated
    env.close()
    return frames, total


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
    """Judge a trained agent on unseen starts, and show an episode."""
    # differs: another environment
    trainer = Trainer(args)
    trainer.actor.load_state_dict(load_checkpoint(args.infer)["parts"]["actor"])
    result = evaluate(trainer.actor, trainer.eval_envs, trainer.device)
    print(returns_line({name[5:]: value for name, value in result.items()}, args))
    modes = {"none": None, "human": "human", "gif": "rgb_array"}
    frames, total = play(trainer.actor, args, modes[args.render])
    if args.render == "gif":
        path = Path(args.infer).with_name(f"episode-seed{args.seed}.gif")
        path.write_bytes(gif_bytes(frames, 80))
        print(f"wrote {path}")
    kind = "greedy" if args.greedy else "sampled"
    print(f"an episode from the start of --seed {args.seed}, {kind}: return {total:.0f}")


# ======== 8  Command line =========================================================================

PHI = {
    "vanilla": "G(tau)",
    "reinforce": "G_t",
    "baseline": "G_t - b",
    "actor_critic": "delta_t",
    "nstep": "A_t^(n)",
    "gae": "sum_l (gamma lambda)^l delta_{t+l}",
    "ppo": "GAE, clipped",
    "grpo": "(G(tau) - mean) / std, clipped",
}
CLIPPED = ("ppo", "grpo")

# The flags that differ by estimator, with their defaults there
ALL = {"num_envs": 32, "entropy_coef": 0.0, "normalize_advantages": "none"}
EPISODES = ALL | {"gamma": 1.0, "actor_learning_rate": 1e-2}
CRITIC = {"gamma": 0.99, "critic_learning_rate": 3e-3}
STEPS = ALL | CRITIC | {"num_steps": 8, "actor_learning_rate": 3e-3}
ONLINE = {"num_steps": 1, "gamma": 0.98, "actor_learning_rate": 5e-4, "critic_learning_rate": 5e-4}
CLIP = {"clip_epsilon": 0.2, "update_epochs": 3, "minibatch_size": 0, "target_kl": 0.0}
PPO = {"lam": 0.95, "num_steps": 32, "minibatch_size": 128, "normalize_advantages": "batch"}
SETTINGS: dict[str, dict] = {
    "vanilla": EPISODES | {"num_envs": 128, "actor_learning_rate": 3e-3},
    "reinforce": EPISODES,
    "baseline": EPISODES | CRITIC | {"baseline": "value", "critic_learning_rate": 1e-2},
    "actor_critic": STEPS | ONLINE,
    "nstep": STEPS | {"n_steps": 5},
    "gae": STEPS | {"lam": 0.95},
    "ppo": STEPS | CLIP | PPO,
    "grpo": EPISODES | CLIP | {"group_size": 16, "actor_learning_rate": 3e-3},
}


def threshold(args: argparse.Namespace) -> float:
    """The mean return at which gymnasium calls the environment solved."""
    return gym.spec(args.env_id).reward_threshold or 0.0


def has_critic(args: argparse.Namespace) -> bool:
    """Whether this run fits V(s)."""
    by_mean = args.adv_estimator == "baseline" and args.baseline != "value"
    return "critic_learning_rate" in SETTINGS[args.adv_estimator] and not by_mean


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


def checkpoint_path(text: str) -> str:
    """An argparse type: a readable checkpoint of this script."""
    return text if load_checkpoint(text) else ""


def build_parser() -> argparse.ArgumentParser:
    # differs: other flags
    about, formatter = (__doc__ or "").splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [--flag value ...]; --help lists all flags"
    parser = argparse.ArgumentParser(usage=usage, description=about, formatter_class=formatter)
    natural, positive = number(int, 0), number(int, 1)
    unit, real = number(float, 0, 1), number(float, 0)
    switch: dict = {"action": argparse.BooleanOptionalAction, "default": False}

    def some(name: str, text: str, **kwargs) -> None:
        """A flag that has another default for each estimator, or is not for all."""
        defaults = {e: s[name] for e, s in SETTINGS.items() if name in s}
        by_value: dict = {}
        for estimator, value in defaults.items():
            by_value.setdefault(value, []).append(estimator)
        text += "; " + "; ".join(f"{', '.join(e)}: {value}" for value, e in by_value.items())
        flag(f"--{name}", help=text, default=argparse.SUPPRESS, **kwargs)

    # fmt: off
    flag = parser.add_argument_group("run").add_argument
    flag("--seed", type=number(int, 0, UNSEEN - 1), default=42,
         help="of networks, starts and actions; with --infer: which start")
    flag("--device", type=device_name, default="auto", help="auto (CUDA if here), cpu, cuda:N, mps")
    flag("--threads", type=natural, default=1,
         help="CPU threads; small networks gain nothing from more; 0: torch decides")
    flag("--run_name", "--version", help="name of the run; None: estimator, environment and seed")
    flag("--output_dir", default="runs", help=f"a run goes to OUTPUT_DIR/{SCRIPT}/RUN_NAME")
    flag("--max_steps", type=positive, default=5_000_000,
         help="stop after the update that reaches so many environment steps; see --target_return")
    flag("--save_steps", type=natural, default=100_000,
         help="environment steps per checkpoint; 0: only the last")
    flag("--eval_every", type=natural, default=5000,
         help="environment steps per evaluation; 0: only the last")
    flag("--eval_episodes", type=positive, default=100,
         help="unseen episodes to evaluate on, greedy and sampled each")
    flag("--target_return", type=real,
         help="stop when both evaluations reach it; None: the environment's threshold; 0: never")
    flag("--resume", type=checkpoint_path, metavar="PATH", help="go on from a checkpoint, exactly")
    flag("--infer", type=checkpoint_path, metavar="PATH", help="judge the agent of a checkpoint")
    flag("--render", choices=["none", "human", "gif"], default="none", help="how --infer shows it")
    flag("--greedy", **switch, help="--render: most likely actions, not samples")
    flag("--detect_anomaly", **switch, help="torch's search for the origin of a NaN (slow)")
    flag("--quiet", **switch, help="no progress bar, no summary")

    flag = parser.add_argument_group("environment").add_argument
    flag("--env_id", choices=["CartPole-v0", "CartPole-v1"], default="CartPole-v1",
         help="200 steps at most and threshold 195, or 500 and 475")
    flag = parser.add_argument_group("algorithm").add_argument
    flag("--adv_estimator", choices=[*PHI, "all"], default="ppo",
         help="Phi_t; all: one after the other, and a table")
    some("num_envs", "N, environments side by side", type=positive)
    some("num_steps", "steps of each environment between updates; 0: an episode", type=natural)
    some("gamma", "discount", type=unit)
    some("actor_learning_rate", "of Adam, 1e-4..1e-2", type=unit)
    some("critic_learning_rate", "of Adam, 1e-4..1e-2", type=unit)
    some("baseline", "b", choices=["value", "trajectory_mean", "batch_time_mean"])
    some("n_steps", "n rewards, then V", type=positive)
    some("lam", "lambda of GAE: 0 TD, 1 Monte Carlo", type=unit)
    some("group_size", "G, episodes of a group", type=number(int, 2))
    some("clip_epsilon", "epsilon of the clip, 0.1..0.3; inf: no clip", type=real)
    some("update_epochs", "passes over a batch, 1..10", type=positive)
    some("minibatch_size", "rows of a gradient step; 0: the whole batch", type=natural)
    some("target_kl", "no further pass after one whose mean k3 is above this, 0.01..0.03; 0: all",
         type=real)
    some("normalize_advantages", "over the batch or each minibatch",
         choices=["none", "batch", "minibatch"])
    some("entropy_coef", "weight of the entropy bonus, 0..0.02; more beside a large Phi_t",
         type=real)
    flag("--max_grad_norm", type=number(float, 1e-6), default=0.5,
         help="clips the gradient of each network, 0.1..1; inf: no clipping")
    flag("--anneal", **switch, help="learning rates fall linearly to 0 at max_steps")
    flag("--hidden_size", type=number(int, 1, 4096), default=64, help="units of both hidden layers")
    # fmt: on
    return parser


# what the command line may change of a checkpoint's flags
FREE = {"resume", "infer", "device", "threads", "quiet", "eval_episodes"}
RESUME_FREE = FREE | {"max_steps", "save_steps", "eval_every", "target_return", "detect_anomaly"}
INFER_FREE = FREE | {"render", "greedy", "seed", "env_id"}


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what depends on the estimator; flags that it does not read become None."""
    settings = SETTINGS[args.adv_estimator]
    names = {name for some in SETTINGS.values() for name in some}
    for name in sorted(names - settings.keys()):
        setattr(args, name, None)
    if args.adv_estimator == "nstep" and not hasattr(args, "num_steps"):
        n_steps = getattr(args, "n_steps", settings["n_steps"])
        args.num_steps = max(settings["num_steps"], n_steps)
    for name, value in settings.items():
        setattr(args, name, getattr(args, name, value))
    if not has_critic(args):
        args.critic_learning_rate = None
    if args.target_return is None:
        args.target_return = threshold(args)
    return args


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags, completed and checked: exit 2 with the flag's name where one can't work."""
    # differs: other flags
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.resume and args.infer:
        parser.error("argument --infer: not with --resume")
    if args.resume or args.infer:
        flag, free = ("resume", RESUME_FREE) if args.resume else ("infer", INFER_FREE)
        saved = load_checkpoint(args.resume or args.infer)
        config = saved["config"] | {"resume": None, "infer": None}
        if not vars(args).keys() <= config.keys():
            parser.error(f"argument --{flag}: was written by another version of {SCRIPT}.py")
        args = parser.parse_args(argv, argparse.Namespace(**config))  # what is given, on top
        for name, value in config.items():
            if name not in free and getattr(args, name) != value:
                parser.error(f"argument --{name}: the checkpoint has {value}")
        if args.resume:
            last = Path(args.resume).with_name("checkpoint-last.pt")
            done = saved["counters"][0]
            if last.exists() and load_checkpoint(str(last))["counters"][0] > done:
                parser.error(f"argument --resume: {last} is later; resume it, or copy the folder")
            if args.max_steps <= done:
                parser.error(f"argument --max_steps: {done} steps are done; give more")
        return args
    for name in ("render", "greedy"):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"argument --{name}: only with --infer")
    if args.run_name is None:
        args.run_name = f"{args.adv_estimator}-{args.env_id[-2:]}-seed{args.seed}"
    if args.run_name in ("", "..") or Path(args.run_name).name != args.run_name:
        parser.error("argument --run_name: give the name of one folder, not a path")
    every = args.adv_estimator == "all"
    for name in vars(args).keys() & {name for some in SETTINGS.values() for name in some}:
        members = [estimator for estimator, some in SETTINGS.items() if name in some]
        if not every and args.adv_estimator not in members:
            parser.error(f"argument --{name}: only for {', '.join(members)}")
    for name in PHI if every else [args.adv_estimator]:
        one = complete(argparse.Namespace(**vars(args) | {"adv_estimator": name}))
        if getattr(args, "critic_learning_rate", None) and not every and not has_critic(one):
            parser.error(f"argument --critic_learning_rate: no critic with {one.baseline}")
        size = one.group_size
        if size and one.num_envs % size:
            sizes = [str(n) for n in range(2, one.num_envs + 1) if one.num_envs % n == 0]
            good = ", ".join(sizes) or "no size does; give more --num_envs"
            parser.error(f"argument --group_size: {size} does not divide --num_envs ({good})")
        if one.n_steps and 0 < one.num_steps < one.n_steps:
            text = f"{one.n_steps} rewards do not fit into --num_steps {one.num_steps}"
            parser.error(f"argument --n_steps: {text}")
    return args if every else one


def returns_line(result: dict, args: argparse.Namespace) -> str:
    """What the evaluation found."""
    return (
        f"mean return of {args.eval_episodes} unseen episodes each: greedy {result['greedy']:.1f}, "
        f"sampled {result['sampled']:.1f} (threshold {threshold(args):.0f})"
    )


def summary(results: list[dict], args: argparse.Namespace) -> str:
    """The last lines of a run; of --adv_estimator all, a table before them."""
    # differs: another goal, and a table of all estimators
    result, lines, run_dir = results[-1], [], Path(results[-1]["run_dir"])
    if args.adv_estimator == "all":
        line, run_dir = "{:<13}{:<36}{:>10}{:>9}{:>8}{:>9}{:>7}", run_dir.parent
        head = "estimator", "Phi_t", "steps", "seconds", "greedy", "sampled", "AUC"
        lines.append(line.format(*head))
        for r in results:
            steps = f"{r['env_steps']:,}" if r["solved"] else "-"
            numbers = (f"{r[name]:.1f}" for name in ("train_seconds", "greedy", "sampled", "auc"))
            lines.append(line.format(r["adv_estimator"], PHI[r["adv_estimator"]], steps, *numbers))
        lines.append("seconds: of training; AUC: mean sampled return over the first 100,000 steps")
    else:
        lines += [
            returns_line(result, args),
            f"{'solved' if result['solved'] else 'not solved'} after {result['env_steps']:,} "
            f"environment steps, {result['updates']:,} updates: {result['train_seconds']:.1f} s of "
            f"training, {result['seconds']:.1f} s in all",
        ]
    where = run_dir if args.adv_estimator == "all" else run_dir.parent.parent
    lines.append(f"logs: {run_dir}    watch: tensorboard --logdir {where}")
    if result["stopped"]:
        alone = "    (this estimator only)" if args.adv_estimator == "all" else ""
        path = f"{result['run_dir']}/checkpoint-last.pt"
        lines.append(f"go on: python {SCRIPT}.py --resume {path}{alone}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    # differs: one run or one of each
    args = parse_args(argv)
    try:
        if args.infer:
            infer(args)
            return 0
        results = train_all(args) if args.adv_estimator == "all" else [train(args)]
    except KeyboardInterrupt:
        print("stopped at once; checkpoints saved before are whole", file=sys.stderr)
        return 130
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if not args.quiet:
        print(summary(results, args))
    return 130 if results[-1]["stopped"] else 0


if __name__ == "__main__":
    sys.exit(main())
