"""The memory of all buckets: gradients come in one by one, and go out bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farprop._torch import foreach_copy, foreach_multiply
from farprop.errors import UsageError
from farprop.nn.parallel.buckets import Bucket
from farprop.nn.parallel.homes import Home

_LARGE = 1 << 14  # elements; one pass over the memory matters more than one call


class Memory:
    """Buckets as the machine wants them.

    Args:
        parameters: all of them.
        names: theirs, for errors.
        sparse: which get sparse gradients.
        buckets: the parameters of each bucket, by number.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        sparse: Sequence[bool],
        buckets: Sequence[Sequence[int]],
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._members = buckets
        self.buckets = [Bucket([parameters[i] for i in members], sparse[members[0]]) for members in buckets]
        self._bucket_of: dict[int, Bucket] = {}
        self.large = {index for index, leaf in enumerate(parameters) if leaf.numel() > _LARGE}
        self._taken: set[int] = set()  # in this iteration
        self.views: dict[int, torch.Tensor] = {}
        for bucket, members in zip(self.buckets, buckets, strict=True):
            self._bucket_of.update(dict.fromkeys(members, bucket))
            if not bucket.is_sparse:
                self.views.update(zip(members, bucket.views, strict=True))

    def take(self, index: int, gradient: torch.Tensor | None, scale: float | None) -> None:
        """Bring a gradient to its place in the bucket, multiplied by ``scale``; small ones wait for :meth:`fill`."""
        self._taken.add(index)
        view = self.views.get(index)
        if view is None:
            self._take_sparse(index, gradient, scale)
        elif gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise UsageError(
                f"The gradient of {self._names[index]} is sparse, which DistributedDataParallel only expects of "
                "nn.Embedding and nn.EmbeddingBag with sparse=True. Make it dense, for example in a hook."
            )
        elif gradient is view:
            if scale is not None:
                view.mul_(scale)
        elif scale is not None and index in self.large and gradient.dtype == view.dtype:
            torch.mul(gradient, scale, out=view)
        else:
            self._bucket_of[index].waiting.append((view, gradient))

    def fill(self, number: int, home: Home, scale: float | None) -> None:
        """Bring all gradients that are not there yet to their places: at once, because a call costs more than a small
        copy.
        """
        for index in self._members[number]:
            if index not in self._taken:
                self.take(index, home.get(self._parameters[index]), scale)
        bucket = self.buckets[number]
        waiting, bucket.waiting = bucket.waiting, []
        if waiting:
            views = [view for view, _ in waiting]
            foreach_copy(views, [gradient for _, gradient in waiting])
            if scale is not None:
                if len(waiting) == len(self._members[number]):
                    bucket.flat.mul_(scale)
                else:
                    foreach_multiply(views, scale)

    def _take_sparse(self, index: int, gradient: torch.Tensor | None, scale: float | None) -> None:
        bucket = self._bucket_of[index]
        if gradient is None:
            bucket.flat = bucket.zeros()
        elif not gradient.is_sparse:
            raise UsageError(
                f"The gradient of {self._names[index]} is dense, but other ranks expect a sparse one, because it is of "
                "an embedding with sparse=True."
            )
        else:
            bucket.flat = gradient.clone() if scale is None else gradient * scale

    def give(self, number: int, home: Home, unused: set[int]) -> None:
        """Bring the gradients of a bucket home, except those that no rank has."""
        bucket, members = self.buckets[number], self._members[number]
        self._taken.difference_update(members)
        places = [bucket.flat] if bucket.is_sparse else bucket.views
        used = [(self._parameters[i], place) for i, place in zip(members, places, strict=True) if i not in unused]
        if used:
            home.put([leaf for leaf, _ in used], [place for _, place in used])

    def adopt(self, old: Memory) -> None:
        """Gradients that are views of older buckets become views of these."""
        for index, view in self.views.items():
            leaf, before = self._parameters[index], old.views[index]
            if leaf.grad is before:
                leaf.grad = view.copy_(before)
