# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.0", "numpy>=1.26",
#     "tensorboard>=2.20", "tqdm>=4.66",
# ]
# ///
"""Pairwise GRPO on a text environment: compare texts two by two, or against their group's mean.

Article: GRPO 的核心机制 … 多语言文本生成环境
Run:     python text_env_pairwise_grpo.py           (0.1 s of training, 4 s in all)
         ends with: target 'hello', greedy 'hello', match: True
Watch:   tensorboard --logdir runs
Show:    python text_env_pairwise_grpo.py --infer runs/.../NAME/checkpoint-last.pt

The policy writes a text, one character a step, and is paid 1 for a right one, -0.1 for a wrong one.
It is not told the target: K texts are compared, and what the better ones did becomes more likely.

Keeps:   the environment; random groups; three losses side by side: the article's formula
         (pairwise_linear), what its prose describes (pairwise_logistic), GRPO's (group_norm).
Changes: one-hot position as observation: with it alone the article's settings learn (its step/len:
         --observation scalar); entropy of the whole distribution (erratum 19); KL measured after
         the step (18); 128 texts an update; a target outside the alphabet is refused (20).
Simple:  all texts have one length, so nothing is masked; the observation is the position, so one
         forward pass of L rows serves all texts, and evaluation is exact.

symbol   | variable     | shape               | meaning
K, L, A  |              |                     | texts of a group, characters of a text, alphabet
r, R     | rewards      | (B, K, L)           | of each character; R: their sum over a text
         | scores       | (B, K) or (B, L, K) | what is compared: R, or each step's rewards to go
rho      | ratio        | (B, K, L)           | pi(a|s) / pi_old(a|s)
w        | log_weights  | as scores           | log weight of a text: of rho's mean, or product
T        | temperature  | (..., 1)            | unit of score differences; auto: std of the group
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

# ======== 1  The maths ============================================================================


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


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's objective per step, to be maximised (Schulman et al. 2017, eq. 7; high: DAPO)."""
    assert ratio.shape == advantages.shape
    # min(rho * A, clip(rho, 1 - low, 1 + high) * A)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def compute_process(rewards: Tensor) -> Tensor:
    """GRPO with process supervision (DeepSeekMath 4.1.3): advantages (B, K, L) of rewards."""
    # r~ = (r - mean(r)) / (std(r) + eps) over all characters of the group; A_t = sum_{s >= t} r~_s
    centred = rewards - rewards.mean(dim=(1, 2), keepdim=True)
    scaled = centred / (rewards.std(dim=(1, 2), keepdim=True) + 1e-4)
    return rewards_to_go(scaled.masked_fill(flat_groups(rewards.flatten(1))[:, None, None], 0.0))


def rewards_to_go(rewards: Tensor) -> Tensor:
    """G_t = sum_{s >= t} r_s over the last dimension, not discounted; G_0 is the return R.

    Summed in float64 (MPS has none): in float32 two texts with the same characters right, but at
    other places, would differ by rounding, and a flat group would not be flat.
    """
    exact = rewards if rewards.device.type == "mps" else rewards.double()
    return exact.flip(-1).cumsum(-1).flip(-1).to(rewards.dtype)


def trajectory_log_weights(log_ratio: Tensor, how: str) -> Tensor:
    """log of a text's importance weight, (B, K, L) -> (B, K)."""
    if how == "sum":  # the true one: w = log prod_t rho_t
        return log_ratio.sum(dim=-1)
    return log_ratio.logsumexp(dim=-1) - math.log(log_ratio.shape[-1])  # w = log(mean_t rho_t)


def flat_groups(scores: Tensor) -> Tensor:
    """(B,) bool: all scores equal. No signal; dividing by their std would amplify rounding."""
    return scores.amax(dim=1) == scores.amin(dim=1)


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


# ======== 2  Environment ==========================================================================

RIGHT, WRONG = 1.0, -0.1
LEVEL_1 = ((high, low) for high in range(0xB0, 0xD8) for low in range(0xA1, 0xFF))
CHARSETS = {  # the target if none is given, the alphabet
    "english": ("hello", "abcdefghijklmnopqrstuvwxyz"),
    "code": ("12345", "0123456789"),
    # GB 2312 level 1, the 3,755 most common characters, and four marks
    "chinese": ("你好世界", b"".join(map(bytes, LEVEL_1)).decode("gb2312", "ignore") + "，。！？"),
}


def position_table(length: int, observation: str) -> np.ndarray:
    """(L + 1, D) observations before each character and after the last. D is L, or 1."""
    if observation == "scalar":  # the article's step / len: neighbours look alike
        return np.arange(length + 1, dtype=np.float32)[:, None] / length
    return np.eye(length + 1, length, dtype=np.float32)  # after the last: zeros


class MultilingualTextEnv(gym.Env):
    """Write a target that is not shown. Action: index of a character. Observation: the position.

    Deterministic: reward 1 for the right character at its place, -0.1 for another, times
    reward_scale; terminated after as many characters as the target has, never truncated.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        target: str = "hello",
        charset: str = CHARSETS["english"][1],
        observation: str = "onehot",
        reward_scale: float = 1.0,
        render_mode: str | None = None,
    ) -> None:
        if problem := target_problem(target, charset):
            raise ValueError(problem)
        self.target, self.charset, self.render_mode = target, charset, render_mode
        self.reward_scale = reward_scale
        self.table = position_table(len(target), observation)
        self.observation_space = gym.spaces.Box(0, 1, self.table.shape[1:], np.float32)
        self.action_space = gym.spaces.Discrete(len(charset))
        self.generated = ""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.generated = ""
        return self.table[0].copy(), {"generated": ""}

    def step(self, action: int) -> tuple:
        if not self.action_space.contains(action):
            raise ValueError(f"action {action} is not one of 0..{len(self.charset) - 1}")
        if len(self.generated) == len(self.target):
            raise gym.error.ResetNeeded("the text is complete: call reset()")
        right = self.charset[action] == self.target[len(self.generated)]
        self.generated += self.charset[action]
        position = len(self.generated)
        reward = self.reward_scale * (RIGHT if right else WRONG)
        done = position == len(self.target)
        return self.table[position].copy(), reward, done, False, {"generated": self.generated}

    def render(self) -> str | None:
        """The text so far, a dot for each character to come, and the target."""
        if self.render_mode != "ansi":
            return None
        return f"{self.generated.ljust(len(self.target), '.')}  (target {self.target})"


def decode(actions: Tensor, charset: str) -> str:
    """The text of actions (L,)."""
    return "".join(charset[a] for a in actions.tolist())


def target_problem(target: str, charset: str) -> str:
    """What is wrong with a target, or nothing."""
    missing = "".join(dict.fromkeys(c for c in target if c not in charset))
    if not target:
        return "the target is empty"
    return f"{missing!r} of {target!r} is not in the alphabet" if missing else ""


# ======== 3  Networks =============================================================================


def mlp(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Module:
    """(L, D) -> (L, outputs): logits, or V. The article's 64-64 ReLU; orthogonal, biases 0."""
    # differs: inputs given, ReLU
    sizes = [inputs, hidden, hidden, outputs]
    linear = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for layer, scale in zip(linear, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])


def policy_dist(actor: nn.Module, positions: Tensor) -> Tensor:
    """log pi (L, A) at all positions (L, D): sampling, scoring and evaluation all go through it."""
    return actor(positions).log_softmax(dim=1)


def at_actions(log_probs: Tensor, actions: Tensor) -> Tensor:
    """log pi of actions (..., L) from log_probs (L, A)."""
    return log_probs[torch.arange(len(log_probs), device=actions.device), actions]


# ======== 4  Rollout: the policy is frozen ========================================================


@dataclass
class Batch:
    """N texts, or B groups of K: then (B, K, L) instead of (N, L)."""

    actions: Tensor  # (N, L) long
    logp_old: Tensor  # (N, L) float
    rewards: Tensor  # (N, L) float


@torch.no_grad()
def sample_batch(
    log_probs: Tensor, target: Tensor, number: int, scale: float, generator: torch.Generator
) -> Batch:
    """number texts from log_probs (L, A), paid against the target's indices (L,)."""
    # differs: the observation is the position
    actions = torch.multinomial(log_probs.exp(), number, replacement=True, generator=generator).T
    rewards = scale * torch.where(actions == target, RIGHT, WRONG)
    return Batch(actions, at_actions(log_probs, actions), rewards)


def form_groups(batch: Batch, group_size: int, generator: torch.Generator) -> Batch:
    """Random groups, as in the article: (N, L) -> (B, K, L)."""
    order = torch.randperm(len(batch.actions), generator=generator, device=generator.device)
    parts = (batch.actions, batch.logp_old, batch.rewards)
    return Batch(*(x[order].unflatten(0, (-1, group_size)) for x in parts))


# ======== 5  Update: the policy moves =============================================================


def prepare_inputs(args: argparse.Namespace, batch: Batch) -> tuple[Tensor, Tensor]:
    """Scores, and what scales them: T (..., 1) for pairs; for group_norm advantages (B, K, L)."""
    # differs: pairs
    process = args.supervision == "process"
    # outcome: the K texts, by R; process: the K characters at each step, by their rewards to go
    to_go = rewards_to_go(batch.rewards)  # (B, K, L)
    scores = to_go.transpose(1, 2) if process else to_go[..., 0]
    if args.normalize_returns:
        scores = (scores - scores.mean()) / (scores.std() + 1e-4)
    if args.adv_estimator == "group_norm":
        if process:
            return scores, compute_process(batch.rewards)
        return scores, compute_grpo(scores)[..., None].expand_as(batch.rewards)
    if args.temperature == "auto":
        return scores, scores.std(dim=-1, keepdim=True) + 1e-4
    return scores, torch.full_like(scores[..., :1], float(args.temperature))


def policy_loss(
    args: argparse.Namespace, log_ratio: Tensor, scores: Tensor, scaling: Tensor
) -> Tensor:
    """One number of log_ratio (B, K, L) and what prepare_inputs made."""
    if args.adv_estimator == "group_norm":
        ratio, epsilon = log_ratio.exp(), args.clip_epsilon
        return -clipped_surrogate(ratio, scaling, epsilon, epsilon).mean()
    if args.supervision == "process":
        log_weights = log_ratio.transpose(1, 2)  # (B, L, K): at each step, a text weighs rho_t
    else:
        log_weights = trajectory_log_weights(log_ratio, args.trajectory_weight)  # (B, K)
    form = {"pairwise_linear": pairwise_linear, "pairwise_logistic": pairwise_logistic}
    return form[args.adv_estimator](log_weights, scores, scaling).mean()


def hybrid_loss(
    args: argparse.Namespace, ratio: Tensor, rewards: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Hybrid-GRPO (6.2): a policy term against a critic's V(s_t) (L,), and the critic's loss."""
    returns, epsilon = rewards_to_go(rewards), args.clip_epsilon  # (B, K, L)
    # A_t = G_t - V(s_t)
    advantages = returns - values.detach()
    term = -clipped_surrogate(ratio, advantages, epsilon, epsilon).mean()
    return term, value_loss(values.expand_as(returns), returns)


def update_model(trainer: Trainer, batch: Batch, scores: Tensor, scaling: Tensor) -> dict:
    """num_updates_per_batch gradient steps on all texts. Returns mean metrics."""
    # differs: pairs
    args, rows = trainer.args, []
    for _ in range(args.num_updates_per_batch):
        log_probs = policy_dist(trainer.actor, trainer.positions)  # (L, A)
        log_ratio = at_actions(log_probs, batch.actions) - batch.logp_old  # (B, K, L)
        ratio, entropy = log_ratio.exp(), categorical_entropy(log_probs).mean()
        loss = policy_loss(args, log_ratio, scores, scaling)
        metrics = {"losses/policy_loss": loss, "losses/entropy": entropy}
        if args.hybrid_coef > 0:
            values = trainer.critic(trainer.positions).squeeze(1)  # (L, 1) -> (L,)
            term, error = hybrid_loss(args, ratio, batch.rewards, values)
            loss = loss + args.hybrid_coef * term + error  # the critic shares no weights
            metrics["losses/value_loss"] = error
        loss = loss - args.entropy_coef * entropy
        trainer.optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(trainer.actor.parameters(), args.max_grad_norm)
        check_finite(loss=loss, gradient=grad_norm)
        trainer.optimizer.step()
        moved = (ratio.detach() - 1).abs()
        metrics["losses/grad_norm"] = grad_norm
        metrics["losses/ratio_deviation"] = moved.mean()  # 0 in the first pass: pi is pi_old
        metrics["losses/clipfrac"] = (moved > args.clip_epsilon).float().mean()
        rows.append({name: float(value.detach()) for name, value in metrics.items()})
    with torch.no_grad():  # how far the whole update went
        logp = at_actions(trainer.log_probs(), batch.actions)
        means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        # k1 = log(pi_old / pi) can be negative, k3 can't
        means["losses/approx_kl"] = kl_k3(batch.logp_old, logp).mean().item()
        means["losses/approx_kl_k1"] = (batch.logp_old - logp).mean().item()
    return means


def check_finite(**tensors: Tensor) -> None:
    """FloatingPointError with the tensor's name where one is NaN or infinite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise FloatingPointError(f"{name} is NaN or infinite")


# ======== 6  Evaluation: exact, no sampling =======================================================


@torch.no_grad()
def evaluate(log_probs: Tensor, target: Tensor) -> dict[str, float]:
    """What the policy log_probs (L, A) is worth: of the target's characters, p_t = pi(c_t | t)."""
    # differs: exact here, by position
    p = log_probs.gather(1, target[:, None]).squeeze(1).exp()  # (L,)
    right = log_probs.argmax(dim=1) == target
    # E[R] = sum_t p_t * 1 - (1 - p_t) * 0.1;  P(match) = prod_t p_t
    return {
        "eval/expected_return": (p * RIGHT + (1 - p) * WRONG).sum().item(),
        "eval/match_probability": p.prod().item(),
        "eval/greedy_right": float(right.sum()),
        "eval/greedy_match": float(right.all()),
    }


# ======== 7  Trainer: state, checkpoints, run folder, loop ========================================

SCRIPT = "text_env_pairwise_grpo"


class Trainer:
    """All that a run changes, and one update of it. Making a Trainer writes nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.args, self.device = args, torch.device(auto if args.device == "auto" else args.device)
        self.step, self.env_steps, self.train_seconds = 0, 0, 0.0
        torch.manual_seed(args.seed)  # networks
        self.generator = torch.Generator(self.device).manual_seed(args.seed)  # characters
        self.grouping = torch.Generator(self.device).manual_seed(args.seed + 1)
        table = position_table(len(args.target), args.observation)[:-1]
        self.positions = torch.as_tensor(table, device=self.device)  # (L, D)
        indices = [args.charset.index(c) for c in args.target]
        self.target = torch.tensor(indices, device=self.device)  # (L,)
        self.actor = mlp(table.shape[1], args.hidden_size, len(args.charset), 0.01).to(self.device)
        self.parts: dict = {"actor": self.actor}
        if args.hybrid_coef > 0:
            self.critic = mlp(table.shape[1], args.hidden_size, 1, 1.0).to(self.device)
            self.parts["critic"] = self.critic
        weights = [p for part in self.parts.values() for p in part.parameters()]
        fused = self.device.type != "mps"
        self.optimizer = torch.optim.Adam(weights, lr=args.learning_rate, fused=fused)
        self.parts["optimizer"] = self.optimizer
        self.saved: list[Batch] = []  # for --save_trajectories
        self.data: list[Batch] = []  # of --offline
        if args.offline:
            file = load_trajectories(args.offline)
            parts = (torch.as_tensor(file[x], device=self.device) for x in TRAJECTORIES[:3])
            batches = [part.split(args.num_trajectories) for part in parts]
            self.data = [Batch(*x) for x in zip(*batches, strict=True)]
        self.last: Batch | None = None

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        """log pi (L, A) as it is now."""
        return policy_dist(self.actor, self.positions)

    def update(self) -> dict[str, float]:
        """Texts, groups, scores, gradient steps. Returns metrics by TensorBoard tag."""
        args, size = self.args, self.args.num_trajectories
        if args.offline:  # the file's batches, again from the first after the last
            batch = self.data[self.step % len(self.data)]
        else:
            target, scale = self.target, args.reward_scale
            batch = sample_batch(self.log_probs(), target, size, scale, self.generator)
            self.env_steps += batch.actions.numel()
        if args.save_trajectories:
            self.saved.append(batch)
        self.last = batch = form_groups(batch, args.group_size, self.grouping)
        scores, scaling = prepare_inputs(args, batch)
        check_finite(scores=scores, scaling=scaling)
        metrics = update_model(self, batch, scores, scaling)
        self.step += 1
        returns = rewards_to_go(batch.rewards)[..., 0]  # (B, K)
        if args.adv_estimator != "group_norm":
            metrics["group/temperature"] = scaling.mean().item()
        return metrics | {
            "score/mean": returns.mean().item(),
            "score/max": returns.max().item(),
            "score/min": returns.min().item(),
            "group/zero_std_frac": flat_groups(returns).float().mean().item(),
            "group/reward_std": returns.std(dim=1).mean().item(),
            "charts/episodic_return": returns.mean().item(),
            "charts/episodic_length": batch.rewards.shape[2],
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def texts(self) -> dict[str, str]:
        """The greedy text, and the best and the worst of the last batch."""
        found = {"greedy": self.log_probs().argmax(dim=1)}
        if self.last:
            rows = self.last.actions.flatten(0, 1)
            returns = rewards_to_go(self.last.rewards)[..., 0].flatten()
            found |= {"best": rows[returns.argmax()], "worst": rows[returns.argmin()]}
        return {name: decode(actions, self.args.charset) for name, actions in found.items()}

    def save_model(self, path: Path) -> None:
        """Write a checkpoint by way of a temporary file: if that fails, the old one is whole."""
        checkpoint = {
            "script": SCRIPT,
            "config": vars(self.args),
            "counters": (self.step, self.env_steps, self.train_seconds),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "generators": (self.generator.get_state(), self.grouping.get_state()),
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
        generators = (self.generator, self.grouping)
        for generator, state in zip(generators, checkpoint["generators"], strict=True):
            if state.shape == generator.get_state().shape:  # else: from another kind of device
                generator.set_state(state)


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


def load_trajectories(path: str) -> dict[str, np.ndarray]:
    """What save_trajectories wrote. ArgumentTypeError says what is wrong with the file."""
    try:
        with np.load(path) as file:
            data = {name: file[name] for name in TRAJECTORIES}
        actions, shapes = data["actions"], {data[name].shape for name in TRAJECTORIES[:3]}
        known = np.arange(len(str(data["charset"])))
        fits = actions.dtype.kind == "i" and actions.shape[1:] == (len(str(data["target"])),)
        if len(shapes) > 1 or not fits or not len(actions) or not np.isin(actions, known).all():
            raise ValueError(shapes)
    except Exception as error:  # numpy raises many kinds for a missing, damaged or foreign file
        reason = error.strerror if isinstance(error, OSError) else None
        text = f"{path} can't be loaded: {reason or 'not a file of --save_trajectories'}"
        raise argparse.ArgumentTypeError(text) from error
    return data


TRAJECTORIES = ("actions", "logp_old", "rewards", "target", "charset")


def save_trajectories(path: str, batches: list[Batch], args: argparse.Namespace) -> None:
    """All texts of a run, in their order, as numpy arrays (M, L), with what they were paid for."""
    arrays: dict = {"target": args.target, "charset": args.charset}
    for name in TRAJECTORIES[:3]:
        arrays[name] = torch.cat([getattr(batch, name) for batch in batches]).cpu().numpy()
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


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
    # differs: texts
    began, trainer = time.perf_counter(), Trainer(args)
    if args.resume:
        trainer.load_model(args.resume)
        folder = Path(args.resume).parent
    else:
        folder = new_folder(Path(args.output_dir) / SCRIPT, args.run_name)
    writer, rows = open_run(folder, args, trainer.step)
    total = None if args.target_return else args.max_steps  # most runs end long before
    bar = tqdm(desc=folder.name, total=total, initial=trainer.step, disable=args.quiet or None)
    stop: list[bool] = []

    def on_interrupt(*_: object) -> None:
        if not args.quiet:
            tqdm.write("finishing this update, then saving; Ctrl-C again stops at once")
        stop.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    main_thread = threading.current_thread() is threading.main_thread()  # else no signal comes
    previous = signal.signal(signal.SIGINT, on_interrupt) if main_thread else None
    done, result = False, evaluate(trainer.log_probs(), trainer.target)
    try:
        while not (done or stop):
            start = time.perf_counter()
            with torch.autograd.set_detect_anomaly(args.detect_anomaly):
                metrics = trainer.update()
            trainer.train_seconds += time.perf_counter() - start
            step = trainer.step
            metrics["charts/env_steps"] = trainer.env_steps
            metrics["charts/train_seconds"] = trainer.train_seconds
            metrics["charts/SPS"] = trainer.env_steps / trainer.train_seconds
            done = step >= args.max_steps
            if done or stop or (args.eval_every and step % args.eval_every == 0):
                metrics |= (result := evaluate(trainer.log_probs(), trainer.target))
                done |= solved(result, args.target_return) and args.target_return > 0
                for name, text in trainer.texts().items():
                    writer.add_text(f"text/{name}", text, step)
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            rows.write(json.dumps({"step": step} | metrics) + "\n")
            rows.flush()
            shown = {"score": metrics["score/mean"], "expected": result["eval/expected_return"]}
            bar.set_postfix({k: f"{v:.2f}" for k, v in shown.items()}, refresh=False)
            bar.update()
            if args.save_steps and step % args.save_steps == 0:
                trainer.save_model(folder / f"checkpoint-{step:06d}.pt")
                trainer.save_model(folder / "checkpoint-last.pt")
        trainer.save_model(folder / "checkpoint-last.pt")
        if trainer.saved:
            save_trajectories(args.save_trajectories, trainer.saved, args)
        if done:
            flags = {k: v for k, v in vars(args).items() if v is not None}
            scores = {name.replace("eval", "hparam"): value for name, value in result.items()}
            writer.add_hparams(flags, scores, run_name=".")
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
        "greedy": trainer.texts()["greedy"],
        "solved": solved(result, threshold(args)),
        "step": trainer.step,
        "env_steps": trainer.env_steps,
        "train_seconds": trainer.train_seconds,
        "seconds": time.perf_counter() - began,
        "run_dir": str(folder),
        "stopped": not done,
    }


def infer(args: argparse.Namespace) -> None:
    """Let a trained agent write: greedily, step by step in the environment, and three samples."""
    # differs: writes texts
    trainer = Trainer(args)
    trainer.actor.load_state_dict(load_checkpoint(args.infer)["parts"]["actor"])
    env = MultilingualTextEnv(
        args.target, args.charset, args.observation, args.reward_scale, render_mode="ansi"
    )
    (observation, info), total, done = env.reset(seed=args.seed), 0.0, False
    while not done:
        position = torch.as_tensor(observation, device=trainer.device)[None]  # (1, D)
        action = policy_dist(trainer.actor, position).argmax().item()
        observation, reward, done, _, info = env.step(int(action))
        total += reward
        print(env.render())
    result = evaluate(trainer.log_probs(), trainer.target)
    print(f"{text_line(info['generated'], args)}, return {total:.2f}")
    print(
        f"expected return, before --reward_scale: {result['eval/expected_return']:.2f} of "
        f"{len(args.target)}; {result['eval/match_probability']:.1%} of samples match"
    )
    batch = sample_batch(trainer.log_probs(), trainer.target, 3, 1.0, trainer.generator)
    print("samples:", ", ".join(repr(decode(row, args.charset)) for row in batch.actions))


# ======== 8  Command line =========================================================================


def threshold(args: argparse.Namespace) -> float:
    """95 % of the highest return, as in the article, before --reward_scale."""
    # differs: no spec in gymnasium
    return 0.95 * len(args.target)


def solved(result: dict[str, float], target_return: float) -> bool:
    """The most likely text is the target, and the expected return is high enough."""
    enough = result["eval/expected_return"] >= target_return
    return enough and result["eval/greedy_match"] == 1


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


def trajectories_path(text: str) -> str:
    """An argparse type: a readable file of --save_trajectories."""
    return text if load_trajectories(text) else ""


def temperature(text: str) -> str | float:
    """An argparse type: auto, or a number above 0."""
    return text if text == "auto" else number(float, 1e-6, 1e6)(text)


def build_parser() -> argparse.ArgumentParser:
    about, formatter = (__doc__ or "").splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [--flag value ...]; --help lists all flags"
    parser = argparse.ArgumentParser(usage=usage, description=about, formatter_class=formatter)
    # differs: flags of texts
    natural, positive, real = number(int, 0), number(int, 1), number(float, 0, 1e6)
    switch: dict = {"action": argparse.BooleanOptionalAction, "default": False}

    # fmt: off
    flag = parser.add_argument_group("run").add_argument
    flag("--seed", type=number(int, 0, 2**31 - 1), default=42,
         help="of network, characters and groups; with --infer: of the samples")
    flag("--device", type=device_name, default="auto", help="auto (CUDA if here), cpu, cuda:N, mps")
    flag("--threads", type=natural, default=1,
         help="CPU threads; small networks gain nothing from more; 0: torch decides")
    flag("--run_name", "--version", help="name of the run; None: estimator, language and seed")
    flag("--output_dir", default="runs", help=f"a run goes to OUTPUT_DIR/{SCRIPT}/RUN_NAME")
    flag("--max_steps", type=positive, default=3000, help="number of updates, 50..10000")
    flag("--save_steps", type=natural, default=500, help="updates per checkpoint; 0: only the last")
    flag("--eval_every", type=natural, default=10, help="updates per evaluation; 0: only the last")
    flag("--target_return", type=real,
         help="stop when the greedy text is right and the expected return, before --reward_scale, "
         "reaches this; None: 95 %% of the highest; 0: never")
    flag("--resume", type=checkpoint_path, metavar="PATH", help="go on from a checkpoint, exactly")
    flag("--infer", type=checkpoint_path, metavar="PATH", help="let a checkpoint's agent write")
    flag("--save_trajectories", metavar="PATH", help="write all texts of this run to a new file")
    flag("--offline", type=trajectories_path, metavar="PATH",
         help="learn from the texts of such a file, over and over; the environment isn't used")
    flag("--detect_anomaly", **switch, help="torch's search for the origin of a NaN (slow)")
    flag("--quiet", **switch, help="no progress bar, no summary")

    flag = parser.add_argument_group("environment").add_argument
    flag("--target", "--target_template", help="the text to find; None: as named at --language")
    flag("--language", choices=[*CHARSETS, "custom"], default="english",
         help="alphabet: a-z (hello), 0-9 (12345), 3,755 common characters (你好世界), --charset")
    flag("--charset", help="the characters of --language custom")
    flag("--observation", choices=["onehot", "scalar"], default="onehot",
         help="the position, or the article's step / len, where neighbours look alike")
    flag("--reward_scale", type=number(float, 1e-6, 1e6), default=1.0,
         help="factor of all rewards, 0.1..100")

    flag = parser.add_argument_group("algorithm").add_argument
    flag("--adv_estimator", choices=["pairwise_logistic", "pairwise_linear", "group_norm"],
         default="pairwise_logistic",
         help="pairs as in the article's prose; as its formula is printed; or GRPO's mean and std")
    flag("--num_trajectories", type=positive, default=128, help="texts an update, 8..512")
    flag("--group_size", type=number(int, 2), default=8, help="K, texts compared, 2..32")
    flag("--temperature", type=temperature, default="auto",
         help="T, unit of score differences, 0.01..10; auto: std of each group; pairwise only")
    flag("--trajectory_weight", choices=["mean", "sum"], default="mean",
         help="w, log of the mean ratio (the article), or the sum of log-ratios; pairwise only")
    flag("--supervision", choices=["outcome", "process"], default="outcome",
         help="compare whole texts, or at each step what follows")
    flag("--normalize_returns", **switch,
         help="scores to mean 0 and std 1 over the batch; pairwise with a number as T only")
    flag("--num_updates_per_batch", type=positive, default=1,
         help="gradient steps on a batch, 1..8; with 1 the ratio is 1 and the clip never acts")
    flag("--clip_epsilon", type=number(float, 0), default=0.2,
         help="epsilon of the clip of group_norm and --hybrid_coef, 0.1..0.3; inf: no clip")
    flag("--learning_rate", type=number(float, 0, 1), default=3e-3, help="of Adam, 1e-3..1e-2")
    flag("--entropy_coef", type=real, default=0.02, help="weight of the entropy bonus, 0..0.05")
    flag("--hybrid_coef", type=real, default=0.0,
         help="weight of a policy term with a critic's V(s) as baseline (Hybrid-GRPO), 0..1")
    flag("--max_grad_norm", type=number(float, 1e-6), default=0.5,
         help="clips the gradient, 0.1..1; inf: no clipping")
    flag("--hidden_size", type=number(int, 1, 4096), default=64,
         help="units of both hidden layers, 16..256")
    # fmt: on
    return parser


# what the command line may change of a checkpoint's flags
FREE = {"resume", "infer", "device", "threads", "quiet"}
RESUME_FREE = FREE | {"max_steps", "save_steps", "eval_every", "target_return", "detect_anomaly"}
INFER_FREE = FREE | {"seed"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags, completed and checked: exit 2 with the flag's name where one can't work."""
    # differs: flags of texts
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.resume and args.infer:
        parser.error("argument --infer: not with --resume")
    if args.resume or args.infer:
        flag, free = ("resume", RESUME_FREE) if args.resume else ("infer", INFER_FREE)
        saved = load_checkpoint(args.resume or args.infer)
        config = saved["config"] | {"resume": None, "infer": None, "save_trajectories": None}
        if vars(args).keys() != config.keys():
            parser.error(f"argument --{flag}: was written by another version of {SCRIPT}.py")
        args = parser.parse_args(argv, argparse.Namespace(**config))  # what is given, on top
        for name, value in config.items():
            if name not in free | {"save_trajectories"} and getattr(args, name) != value:
                parser.error(f"argument --{name}: the checkpoint has {value}")
        if args.resume and args.save_trajectories:
            parser.error("argument --save_trajectories: not with --resume")
        if args.infer:
            args.offline = None
        if args.offline:
            try:
                load_trajectories(args.offline)
            except argparse.ArgumentTypeError as error:
                parser.error(f"argument --offline: {error}")
        if args.resume:
            last = Path(args.resume).with_name("checkpoint-last.pt")
            done = saved["counters"][0]
            if last.exists() and load_checkpoint(str(last))["counters"][0] > done:
                parser.error(f"argument --resume: {last} is later; resume it, or copy the folder")
            if args.max_steps <= done:
                parser.error(f"argument --max_steps: {done} updates are done; give more")
        return args
    custom = args.language == "custom"
    if custom != bool(args.charset):
        parser.error("argument --charset: give it with --language custom, and only then")
    if custom and len(set(args.charset)) < max(2, len(args.charset)):
        parser.error("argument --charset: two characters at least, none twice")
    if not custom:
        text, args.charset = CHARSETS[args.language]
        args.target = text if args.target is None else args.target
    if problem := target_problem(args.target or "", args.charset):
        parser.error(f"argument --target: {problem}")
    if args.num_trajectories % args.group_size:
        text = f"{args.group_size} does not divide --num_trajectories {args.num_trajectories}"
        parser.error(f"argument --group_size: {text} ({divisors(args.num_trajectories)})")
    for name in ("temperature", "trajectory_weight", "normalize_returns"):
        given = getattr(args, name) != parser.get_default(name)
        if given and args.adv_estimator == "group_norm":
            parser.error(f"argument --{name}: not for group_norm")
    if args.normalize_returns and args.temperature == "auto":
        parser.error("argument --normalize_returns: give a number as --temperature; auto undoes it")
    if args.trajectory_weight == "sum" and args.supervision == "process":
        parser.error("argument --trajectory_weight: process compares single steps")
    if args.offline:
        data = load_trajectories(args.offline)
        texts, target = len(data["actions"]), str(data["target"])
        if (target, str(data["charset"])) != (args.target, args.charset):
            parser.error(f"argument --offline: was made for {target!r}, or another alphabet")
        if texts % args.num_trajectories:
            text = f"{args.num_trajectories} does not divide the {texts} texts of --offline"
            parser.error(f"argument --num_trajectories: {text} ({divisors(texts)})")
        if args.save_trajectories or args.reward_scale != 1:
            name = "save_trajectories" if args.save_trajectories else "reward_scale"
            parser.error(f"argument --{name}: not with --offline, which has its rewards")
    if args.save_trajectories:
        path = Path(args.save_trajectories)
        if path.exists() or not os.access(path.parent, os.W_OK):
            why = "exists" if path.exists() else f"can't be written to {path.parent}"
            parser.error(f"argument --save_trajectories: {path} {why}")
    if args.run_name is None:
        args.run_name = f"{args.adv_estimator}-{args.language}-seed{args.seed}"
    if args.run_name in ("", "..") or Path(args.run_name).name != args.run_name:
        parser.error("argument --run_name: give the name of one folder, not a path")
    if args.target_return is None:
        args.target_return = threshold(args)
    return args


def divisors(total: int) -> str:
    """The sizes from 2 that divide total, for an error message."""
    sizes = [str(n) for n in range(2, total + 1) if total % n == 0]
    return f"what does: {', '.join(sizes)}" if sizes else "nothing does"


def text_line(greedy: str, args: argparse.Namespace) -> str:
    """Whether the most likely text is the target."""
    return f"target {args.target!r}, greedy {greedy!r}, match: {greedy == args.target}"


def summary(result: dict, args: argparse.Namespace) -> str:
    """The last lines of a run."""
    # differs: texts
    run_dir = Path(result["run_dir"])
    lines = [
        f"{'solved' if result['solved'] else 'not solved'}: expected return "
        f"{result['expected_return']:.2f} of {len(args.target)} (threshold {threshold(args):.2f}), "
        f"{result['match_probability']:.0%} of samples match",
        f"{result['step']:,} updates, {result['env_steps']:,} environment steps, "
        f"{result['train_seconds']:.2f} s of training, {result['seconds']:.1f} s in all",
        f"logs: {run_dir}    watch: tensorboard --logdir {run_dir.parent.parent}",
    ]
    if result["stopped"]:
        lines.append(f"go on: python {SCRIPT}.py --resume {run_dir}/checkpoint-last.pt")
    lines.append(text_line(result["greedy"], args))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    # differs: one run; prints Chinese
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Chinese
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
