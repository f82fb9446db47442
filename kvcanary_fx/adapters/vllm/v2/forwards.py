"""The forwards of a Model Runner V2: what is checked before and after the model."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from ....engine.kept_forward import KeptForward
from ....engine.kept_step import KeptStep
from ....engine.layers import LayerChecks
from ....engine.session import EngineSession
from ....runtime.pace import Sample
from ..batches import kernel_tables
from ..breakable import next_piece_overwrites
from ..ops import layers_are_apart
from ..pools import Group
from .batches import histories, make_batch
from .images import Images
from .kept import KeptSteps
from .rows import Rows


class Forwards:
    """Chooses, for each batch, between checks that were captured and those that are launched one by one.

    Attributes:
        images: of the requests.
        go_on: see :meth:`.KeptSteps.go_on`; after :meth:`may_go_on`, and before anything else was checked.
        run: see :class:`.Run`; ``hand_out``, :meth:`.KeptSteps.hand_out`.
    """

    def __init__(
        self,
        runner: Any,
        groups: Sequence[Group],
        session: EngineSession,
        checks: LayerChecks,
        rows: Rows,
        places: Callable[[torch.Tensor], None],
    ):
        """
        Args:
            checks: with room reserved for the largest batch.
            places: launches what is checked besides, given the counts of the step; the device has its inputs.
        """
        self._runner, self._groups, self._session, self._places = runner, groups, session, places
        self._checks, self._rows = checks, rows
        self._steps = KeptSteps(runner, groups, session, checks, rows, places)
        self.go_on, self.run, self.hand_out = self._steps.go_on, self._steps.run, self._steps.hand_out
        self._alike: set[int] = set()  # graphs, by their tokens, whose attention reads the runner's own tables
        self.images = Images(runner.is_encoder_decoder)

    def captured(self) -> None:
        """A graph was captured."""
        self._steps.captured()

    def for_graph(self, tokens: int) -> KeptForward | None:
        """The checks before the model that its graph for so many tokens has in it; None: it has none."""
        return self._steps.for_graph(tokens)

    def skip(self) -> None:
        """The checks before the model in the graph that is about to be replayed are to do nothing."""
        self._steps.skip()

    def interrupted(self) -> None:
        """The next step is none that goes on as the last one did."""
        self._steps.interrupted()

    @functools.cached_property
    def _holds(self) -> bool:
        return layers_are_apart(self._runner.vllm_config)

    @property
    def holds(self) -> bool:
        """Whether K and V of the layers are held until the model has run, also where they were captured."""
        return self._holds and not next_piece_overwrites()

    def begin(
        self,
        batch: Any,
        metadata: Any,
        joined: Sequence[Any],
        namespaces: Mapping[str, int],
        in_flight: bool,
        graph: int,
    ) -> contextlib.AbstractContextManager[Any]:
        """The model is about to run.

        Args:
            batch: vLLM's ``InputBatch``, prepared.
            metadata: of attention, by layer; None: in the forward context.
            joined: the requests that are new in this step.
            namespaces: by the request's id, if not 0.
            in_flight: another request writes some request's prefix in this forward.
            graph: the tokens of the graph that is about to be replayed, if it has the checks before its model in it;
                else 0.

        Returns:
            What ends the checks; it was entered.
        """
        # what a request takes up from the prefix cache; what it wrote itself is compared by the chain of tokens
        prompts = {new.req_id: new.prefill_token_ids or () for new in joined if new.num_computed_tokens}
        hold = metadata is None and self.holds  # with metadata, a graph of all of the model is about to be replayed
        images = self.images.within(batch)
        kept = None if prompts or in_flight or images else self._steps.kept(batch)
        in_graph = bool(graph) and kept is not None and self._reads_its_tables(graph, metadata)
        running: contextlib.AbstractContextManager[Any]
        if kept is not None:
            running = self._steps.step(kept, batch, namespaces, hold, in_graph)
            running.__enter__()
            if in_graph and not self.images.any:
                self._steps.may_go_on(batch)
        else:
            self._steps.overwritten()
            running = self._begin_anew(batch, prompts, namespaces, in_flight, images, hold)
        try:
            if not in_graph:
                self._compare_tables(batch, metadata, kept)
                if graph:
                    self._steps.skip()
        except BaseException:
            running.__exit__(*sys.exc_info())
            raise
        return running

    def again(self, batch: Any, graph: int, namespaces: Mapping[str, int]) -> KeptStep | None:
        """Begin as :meth:`begin` does, if it would come to what it came to in the last step; None: nothing has begun.

        Args:
            graph: as of :meth:`begin`.
        """
        if graph not in self._alike or self.images.any:
            return None
        step = self._steps.again(batch, namespaces)
        if step is not None:
            step.__enter__()
            self._steps.may_go_on(batch)
        return step

    def _begin_anew(
        self,
        batch: Any,
        prompts: Mapping[str, Sequence[int]],
        namespaces: Mapping[str, int],
        in_flight: bool,
        images: bool,
        hold: bool,
    ) -> contextlib.AbstractContextManager[Any]:
        """Of a batch with a prompt from the prefix cache, with images, or with requests that read what others write."""
        rows = self._rows.rows_of(batch.req_ids)
        self._rows.write(self._rows.new_pages())
        fields = make_batch(self._runner, batch, self._groups, rows, namespaces, in_flight)
        if images:
            fields["input_ids"] = self.images.marked(batch, fields["input_ids"])
        if prompts:
            fields["history"], fields["history_lens"] = histories(batch.req_ids, prompts)
            self.images.mark_prompts(batch.req_ids, fields["history"])
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._session.step(fields))
            self._places(self._session.inputs.counts)
            opened.enter_context(self._session.forward())
            opened.enter_context(self._checks.publish(hold))
            return opened.pop_all()

    def _reads_its_tables(self, graph: int, metadata: Any) -> bool:
        """Whether the attention of a graph gets the runner's own tables, which its checks compare; it always does, or
        never."""
        if graph not in self._alike and isinstance(metadata, dict):
            layers = ((group, group.layer_with_table) for group in self._groups)
            if all(layer is None or self._steps.compared(group, metadata[layer]) for group, layer in layers):
                self._alike.add(graph)
        return graph in self._alike

    def _compare_tables(self, batch: Any, metadata: Any, kept: KeptForward | None) -> None:
        """Compare the block tables that the attention kernels get with the scheduler's.

        Args:
            kept: has compared the runner's own.
        """
        if metadata is None and is_forward_context_available():
            metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return
        for group in self._groups:
            if group.layer_with_table is None:
                continue
            layer = metadata[group.layer_with_table]
            if kept is not None and self._steps.compared(group, layer):
                continue
            given = kernel_tables(layer, batch.seq_lens, batch.num_reqs)
            if given is None:
                continue
            if kept is not None:
                self._steps.compare_table(kept, group, *given)
            else:
                self._session.check_reads(*given, pool=group.name, page_size=group.kernel_page_size)


class Measured:
    """A forward that goes on as the last one did, and is measured, while the model runs."""

    def __init__(self, sample: Sample):
        self._sample = sample

    def end(self, kind: type[BaseException] | None = None, error: BaseException | None = None, _: Any = None) -> None:
        """The model has run, or raised."""
        if kind is None:
            self._sample.model_ran()
            self._sample.end()
