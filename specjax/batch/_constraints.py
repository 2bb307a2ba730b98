"""From settings to controls: ids checked, each constraint built once."""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specjax.batch._settings import CONSTRAINTS, REQUEST
from specjax.decode import Controls
from specjax.text import TokenMask

if TYPE_CHECKING:
    from specjax.weights import Model

# Of the one table that holds all constraints of a run. The largest constraint that
# there can be, 1024 states, fits with up to 262144 ids.
_TABLE_BYTES = 2**30


class Constraints:
    """The token masks of a run.

    Masks are taken in the order in which they are asked for, as long as they fit one
    table; so what fits does not depend on where a run was interrupted, provided that
    it asks for all of them in the order of its records.

    Attributes:
      n_states: states of all masks together.
    """

    def __init__(self, model: "Model", *, ignore_eos: bool) -> None:
        """Takes what masks depend on.

        Args:
          model: tokenizer, end ids and vocabulary.
          ignore_eos: whether texts do not end at the model's end ids, so that only
            what can go on for ever is a constraint.
        """
        self.n_states = 0
        self._tokenizer = model.need_tokenizer()
        self._ignore_eos = ignore_eos
        self._eos_ids = () if ignore_eos else model.eos_ids
        self._vocab_size = model.target.spec.vocab_size
        # A mask, or why there is none.
        self._found: dict[tuple[str, str], TokenMask | str] = {}

    @property
    def masks(self) -> tuple[TokenMask, ...]:
        """The masks so far, each once."""
        return tuple(m for m in self._found.values() if isinstance(m, TokenMask))

    @property
    def table_bytes(self) -> int:
        """Size of the table of the masks so far."""
        return self._bytes(self.n_states)

    def controls(self, sampling: Mapping[str, Any]) -> Controls:
        """Makes the controls of a request.

        Args:
          sampling: its checked settings, ``max_new_tokens`` among them.

        Returns:
          Its controls; equal constraints are one mask.

        Raises:
          ValueError: an id is outside the vocabulary, a length or position beyond the
            output, or there is no mask for the constraint.
        """
        names = set(sampling) - {*REQUEST, *CONSTRAINTS}
        controls = Controls(**{name: sampling[name] for name in names})
        controls.check(self._vocab_size, sampling["max_new_tokens"])
        for kind in CONSTRAINTS:
            if (value := sampling.get(kind)) is not None:
                mask = self._mask(kind, value)
                controls = dataclasses.replace(controls, token_mask=mask)
        return controls

    def _mask(self, kind: str, value: str | Mapping[str, Any]) -> TokenMask:
        # Keys unsorted: their order is that of the properties in the output.
        text = value if isinstance(value, str) else json.dumps(value)
        found = self._found.get((kind, text))
        if found is None:
            try:
                found = self._build(kind, text)
            except (ValueError, RecursionError) as error:
                # Kept too, so that a file of one broken pattern fails fast.
                found = str(error)
            self._found[kind, text] = found
        if isinstance(found, str):
            raise ValueError(f"{kind}: {found}")
        return found

    def _build(self, kind: str, text: str) -> TokenMask:
        make = {
            "regex": TokenMask.from_regex,
            "json_schema": TokenMask.from_json_schema,
        }[kind]
        try:
            mask = make(
                text, self._tokenizer, self._eos_ids, vocab_size=self._vocab_size
            )
        except ValueError as error:
            if not self._ignore_eos:
                raise
            raise ValueError(f"{error} (--ignore_eos leaves no end ids)") from error
        n_states = self.n_states + mask.n_states
        if self._bytes(n_states) > _TABLE_BYTES:
            raise ValueError(
                f"{mask.name} has {mask.n_states} states, and with the {self.n_states} "
                f"of the {len(self.masks)} constraints before it the table would take "
                f"{self._bytes(n_states) / 1e6:.0f} MB, more than the "
                f"{_TABLE_BYTES / 1e6:.0f} MB of a run: use fewer different "
                "constraints in one file, or lower their counts"
            )
        self.n_states = n_states
        return mask

    def _bytes(self, n_states: int) -> int:
        # Tables are padded to a power of two.
        rows = 1 << (n_states - 1).bit_length() if n_states else 0
        return 4 * rows * self._vocab_size
