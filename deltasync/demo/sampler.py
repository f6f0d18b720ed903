"""Generate completions with the live rollout weights, and score them."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from deltasync.demo.task import MAX_NEW_TOKENS, Problem, make_problems, reward


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion: token ids of prompt and completion, its reward, and the prompt it belongs to (`group`)."""

    group: int
    prompt: list[int]
    completion: list[int]  # ends with the token that ended it: never empty
    text: str
    reward: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Judge:
    """What every way of sampling shares: prompts as token ids, the tokens that end a completion, its reward."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        (newline,) = tokenizer.encode("\n", add_special_tokens=False)
        self.ends: tuple[int, int] = (tokenizer.eos_token_id, newline)

    def encode(self, problem: Problem) -> list[int]:
        ids: list[int] = self._tokenizer.encode(problem.prompt, add_special_tokens=False)
        return ids

    def judge(self, group: int, problem: Problem, prompt: list[int], completion: list[int]) -> Sample:
        text = self._tokenizer.decode(completion, skip_special_tokens=True)
        return Sample(group, prompt, completion, text, reward(problem, text))


class Sampler:
    """Hugging Face `generate` at temperature 1, so that samples follow the policy itself."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self._model: Any = model
        self._pad_token = tokenizer.pad_token_id
        self._judge = Judge(tokenizer)

    def sample(self, *, prompts: int, group: int, seed: int) -> list[Sample]:
        """`group` completions for each of `prompts` problems; the same ones for the same weights and seed."""
        torch.manual_seed(seed)
        samples = []
        for number, problem in enumerate(make_problems(prompts, seed)):
            prompt = self._judge.encode(problem)
            encoded = torch.tensor([prompt])
            with torch.no_grad():
                rows = self._model.generate(
                    input_ids=encoded,
                    attention_mask=torch.ones_like(encoded),
                    max_new_tokens=MAX_NEW_TOKENS,
                    num_return_sequences=group,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    eos_token_id=list(self._judge.ends),
                    pad_token_id=self._pad_token,
                )
            for row in rows.tolist():
                completion = self._until_end(row[len(prompt) :])
                samples.append(self._judge.judge(number, problem, prompt, completion))
        return samples

    def _until_end(self, ids: list[int]) -> list[int]:
        """Up to and with the first ending token; what follows is padding."""
        return next((ids[: i + 1] for i, token in enumerate(ids) if token in self._judge.ends), ids)
