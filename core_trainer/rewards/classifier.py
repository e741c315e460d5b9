"""The sequence classifier: a reward model that reads prompt and response and gives a number."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from core_trainer import models
from core_trainer.rewards.types import Outcome, RewardInput, Verdict
from core_trainer.tasks import hint
from rlinsight.config import ClassifierReward, ModelSection
from rlinsight.errors import ConfigError, ModelError


class Classifier:
    """Scores texts in batches of about equal length. The score of a text does not depend on the others."""

    def __init__(self, section: ClassifierReward) -> None:
        """Loads the model. Raises ModelError when it is no classifier, ConfigError when ``label`` does not fit it."""
        self._section = section
        directory = models.resolve(ModelSection(source=section.source, revision=section.revision))
        dtype = models.compute_dtype(section.compute_dtype)
        self._model, missing = models.load_pretrained(AutoModelForSequenceClassification, directory, dtype)
        if missing:
            raise ModelError(f"model {directory} has no trained classification head ({missing[0]} is not in its files)")
        models.to_accelerator(self._model)
        self._tokenizer = models.load_tokenizer(directory)
        self._labels: dict[int, str] = self._model.config.id2label
        self._label = self._index(section.label)
        context = getattr(self._model.config, "max_position_embeddings", None)
        if section.max_tokens is not None and context is not None and section.max_tokens > context:
            raise ConfigError(f"max_tokens={section.max_tokens} exceeds the model's context of {context}; lower it")
        self._longest = section.max_tokens or context
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._model.config.pad_token_id is None:  # a decoder reads its score at the last token that is no padding
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def _index(self, label: str | None) -> int | None:
        """Which logit to read; None for the only one."""
        known = list(self._labels.values())
        if len(known) == 1:
            if label is not None:
                raise ConfigError(f"label={label!r} has no effect with a model of a single logit; remove it")
            return None
        if label is None:
            raise ConfigError(f"the model has {len(known)} classes; set label to one of {', '.join(known)}")
        if label not in known:
            raise ConfigError(f"label={label!r}: the model has no such class; {hint(label, known)}")
        return next(index for index, name in self._labels.items() if name == label)

    def score(self, items: Sequence[RewardInput]) -> list[tuple[Outcome, float]]:
        """Outcome of each response and the seconds it took: its share of its batch."""
        texts = [
            self._section.template.format(
                prompt=item.prompt.text, response=item.response, answer=item.prompt.answer or ""
            )
            for item in items
        ]
        # The chat template of the prompt wrote its special tokens; a tokenizer without one adds its own.
        special = not self._tokenizer.chat_template
        rows = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []
        lengths = [len(row) for row in rows]
        if self._longest is not None and self._section.truncation != "error":
            self._tokenizer.truncation_side = self._section.truncation
            cut = {"truncation": True, "max_length": self._longest}
            rows = self._tokenizer(texts, add_special_tokens=special, verbose=False, **cut)["input_ids"]
        outcomes: dict[int, tuple[Outcome, float]] = {}
        fitting = []
        for position, row in enumerate(rows):
            if self._longest is not None and len(row) > self._longest:
                error = f"the text has {len(row)} tokens, over {self._longest}; set max_tokens or truncation"
                outcomes[position] = (Outcome(error=error), 0.0)
            else:
                fitting.append(position)
        for batch in self._batches(fitting, rows):
            began = time.perf_counter()
            logits = self._forward([rows[position] for position in batch])
            seconds = (time.perf_counter() - began) / len(batch)
            for position, row in zip(batch, logits, strict=True):
                outcomes[position] = (self._outcome(row, lengths[position], len(rows[position])), seconds)
        return [outcomes[position] for position in range(len(items))]

    def _batches(self, positions: list[int], rows: list[list[int]]) -> Iterator[list[int]]:
        """Positions by length, ``batch_tokens`` at a time, padding counted."""
        batch: list[int] = []
        for position in sorted(positions, key=lambda p: len(rows[p])):
            if batch and (len(batch) + 1) * len(rows[position]) > self._section.batch_tokens:
                yield batch
                batch = []
            batch.append(position)
        if batch:
            yield batch

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> Tensor:
        """Logits [len(rows), classes] float64, on the CPU."""
        batch = self._tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        ids, mask = (batch[key].to(self._model.device) for key in ("input_ids", "attention_mask"))
        return self._model(input_ids=ids, attention_mask=mask).logits.double().cpu()

    def _outcome(self, logits: Tensor, length: int, read: int) -> Outcome:
        if not bool(torch.isfinite(logits).all()):
            return Outcome(error="the model's output is not finite")
        cut = f"read {read} of {length} tokens" if read < length else None
        if self._label is None:
            return Outcome((Verdict(float(logits[0]), explanation=cut),))
        likeliest = self._labels[int(logits.argmax())]
        return Outcome((Verdict(float(logits.softmax(-1)[self._label]), likeliest, cut),))
