"""The judge: a generative model that is asked about each response, served by the native engine in this process.

Owns: the question and what the judge writes. Does not own: the score in it (judged.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from core_trainer import attention, models
from core_trainer.rewards.types import Outcome, RewardInput
from core_trainer.rollout.engine import GenerateRequest
from core_trainer.rollout.native.engine import NativeEngine
from core_trainer.types import SamplingParams
from rlinsight.config import JudgeReward, ModelSection
from rlinsight.errors import RlinsightError

_MARKER = "QUESTION-TEXT"


class Judge:
    """A model and the engine that serves it."""

    def __init__(self, section: JudgeReward) -> None:
        """Loads the model. Raises ModelError or ConfigError."""
        self._section = section
        directory = models.resolve(ModelSection(source=section.source, revision=section.revision))
        self._model = models.load_model(directory, models.compute_dtype(section.compute_dtype))
        models.to_accelerator(self._model)
        attention.enable(self._model)
        self._tokenizer = models.load_tokenizer(directory)
        stop = models.end_of_turn_ids(self._model.generation_config, self._tokenizer)
        self._engine = NativeEngine(self._model, self._tokenizer, stop, section.max_batch_size)
        self._engine.sync_weights(0)
        self._before, self._after = self._frame()

    def ask(self, items: Sequence[RewardInput]) -> list[str | Outcome]:
        """What the judge writes about each response, or how asking failed. Nothing it was asked before shows."""
        self._engine.forget()
        return asyncio.run(self._ask_all(items))

    async def _ask_all(self, items: Sequence[RewardInput]) -> list[str | Outcome]:
        return list(await asyncio.gather(*(self._ask(position, item) for position, item in enumerate(items))))

    async def _ask(self, position: int, item: RewardInput) -> str | Outcome:
        section = self._section
        question = section.template.format(
            prompt=item.prompt.text, response=item.response, answer=item.prompt.answer or ""
        )
        tokens = self.tokens(question)
        longest = self._engine.max_length
        if longest is not None and len(tokens) + section.max_new_tokens > longest:
            return Outcome(
                error=f"the judge's question has {len(tokens)} tokens; with max_new_tokens={section.max_new_tokens} it "
                f"exceeds the judge's context of {longest}"
            )
        # The seed follows what is asked, so that the judge's mood depends on no other rollout.
        seed = int.from_bytes(hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()[:8], "little") >> 1
        params = SamplingParams(section.max_new_tokens, section.temperature, seed=seed)
        try:
            turn = await self._engine.generate(GenerateRequest(f"judge-{position}", tokens, params))
        except RlinsightError as error:
            return Outcome(error=f"the judge failed: {error}")
        return turn.text

    def tokens(self, question: str) -> tuple[int, ...]:
        """The question as the judge reads it. What looks like a special token in there is plain text: a response must
        not be able to end the question and speak as someone else.
        """
        plain = not self._tokenizer.chat_template  # then the tokenizer adds what a text begins with
        ids = self._tokenizer(question, add_special_tokens=plain, split_special_tokens=True, verbose=False)["input_ids"]
        return (*self._before, *ids, *self._after)

    def _frame(self) -> tuple[list[int], list[int]]:
        """Tokens that the chat template writes before and after the question; none where there is no template."""
        if not self._tokenizer.chat_template:
            return [], []
        messages = [{"role": "user", "content": _MARKER}]
        text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        before, _, after = text.partition(_MARKER)
        before, after = (self._tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
        return before, after
