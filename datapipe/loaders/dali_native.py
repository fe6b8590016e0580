"""The `dali` backend with DALI's own tar reader: for comparison, and for those who want DALI's behaviour.

It reads the tar shards with the index that `pack` wrote beside them. The order is DALI's: shards in turn, through a
shuffle buffer, so batches do not say which samples they hold (-1), nothing can be resumed within an epoch, and what
does not fill the last batch is seen in the next epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ..dataset import DataSet
from ..errors import MissingBackendError, SettingError
from .base import Batch, Loader, LoaderOptions, Split, device_of
from .threads import in_time

SHUFFLED = 1024  # samples that the next one is drawn from: DALI's default
TRIES = 10  # as in augment.TRIES


def open(path: Path | str, options: LoaderOptions, device: object) -> NativeLoader:
    with in_time(options.timeout_s, path, "opening the data set", DataSet, path) as data_set:
        return NativeLoader(data_set, options, device_of(device))


class NativeLoader(Loader):
    """See `open_loader`."""

    def __init__(self, data_set: DataSet, options: LoaderOptions, device: torch.device) -> None:
        super().__init__(Split.of(data_set), options)
        if not options.train or options.last != "drop" or self._augment.crop != "random_resized":
            raise SettingError("reader: 'native' trains only, with random_resized crops and last='drop'; use indexed")
        options.only_defaults("reader: 'native'", order="full", io="cached", max_bad=0)
        if data_set.manifest.format != "tar":
            raise SettingError(f"reader: 'native' reads tar shards, not {data_set.manifest.format}; use indexed")
        self._device = device
        shards = [str(data_set.folder / shard.name) for shard in data_set.manifest.shards]
        self._pipelines = [self._built(shards)]
        weakref.finalize(self, self._pipelines.clear)

    def close(self) -> None:
        super().close()
        self._pipelines.clear()

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        if state.get("step"):
            raise SettingError("reader: 'native' cannot go on within an epoch; use indexed")
        super().load_state_dict(state)

    def _built(self, shards: list[str]):
        try:
            from nvidia.dali import Pipeline, fn, types
        except ImportError as error:
            raise MissingBackendError.for_extra("DALI is not installed", "dali") from error
        on_gpu, options = self._device.type == "cuda", self.options
        pipeline = Pipeline(
            batch_size=options.batch_size,
            num_threads=options.num_threads(),
            device_id=(self._device.index or 0) if on_gpu else None,
            seed=options.seed,
        )
        with pipeline:
            data, label = fn.readers.webdataset(
                paths=shards,
                index_paths=[str(Path(shard).with_suffix(".idx")) for shard in shards],
                ext=["jpg;jpeg;png", "cls"],
                missing_component_behavior="error",
                random_shuffle=True,
                initial_fill=SHUFFLED,
                shard_id=options.rank,
                num_shards=options.world_size,
                seed=options.seed,
            )
            images = fn.decoders.image_random_crop(
                data,
                device="mixed" if on_gpu else "cpu",
                output_type=types.RGB if self.channels == 3 else types.GRAY,
                adjust_orientation=False,  # as all other backends
                random_area=self._augment.scale,
                random_aspect_ratio=self._augment.ratio,
                num_attempts=TRIES,
            )
            images = fn.resize(images, size=[self.size, self.size], interp_type=types.INTERP_LINEAR, antialias=True)
            mirror = fn.random.coin_flip(probability=0.5 if self._augment.flip else 0.0)
            pipeline.set_outputs(fn.flip(images, horizontal=mirror), label)
        pipeline.build()
        return pipeline

    def _batches(self, epoch: int, steps: range) -> Iterator[Batch]:
        from nvidia.dali.plugin.pytorch import feed_ndarray

        (pipeline,) = self._pipelines
        for _ in steps:
            images, labels = pipeline.run()
            shape = (self.options.batch_size, self.size, self.size, self.channels)
            images_BHWC = torch.empty(shape, dtype=torch.uint8, device=self._device)
            stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
            feed_ndarray(images.as_tensor(), images_BHWC, cuda_stream=stream)
            numbers = torch.tensor([int(bytes(np.asarray(labels.at(i)))) for i in range(len(labels))])
            rest = numbers, torch.full_like(numbers, -1), torch.ones_like(numbers, dtype=torch.bool)
            yield Batch(images_BHWC.permute(0, 3, 1, 2), *(part.to(self._device) for part in rest))
