"""The sections of a recipe that no other module owns: data, model and train."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from datapipe.names import BACKENDS, ORDERS, Crop, Flip, Io

from .. import models
from ..optim.settings import BelowOne, Count, Fraction, FromZero, Positive, Section, one_of, or_none
from ..step.losses import LOSSES

POLICIES = "stop", "skip", "roll_back"
GRADIENT_DTYPES = "float32", "bfloat16"
COMPILE_MODES = "default", "reduce-overhead", "max-autotune"
# PowerSGD adds what it has left out of a gradient to all later ones, also what is not finite.
NOT_WITH_POWERSGD = {"gradient_dtype": ("bfloat16",), "precision": ("fp16",), "when_diverged": ("skip", "roll_back")}

_CountFromZero = Annotated[int, Field(ge=0)]
_Size = Annotated[int, Field(ge=8, le=4096)]
_Share = Annotated[float, Field(gt=0, le=1)]
# Not empty, which is what an unset variable leaves, and would mean the current folder.
_Folder = Annotated[str, Field(min_length=1)]


def _rising(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError("the first must not be greater than the second")
    return pair


class Data(Section):
    """How samples become the network's input.

    The settings from `cache` on are those of `open_loader`; "none" leaves a setting to it.
    """

    size: _Size
    """Side of the square input, in pixels."""
    mean: Annotated[tuple[Fraction, ...], Field(min_length=1, max_length=3)]
    """Mean of each channel, of pixel values from 0 to 1."""
    std: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1, max_length=3)]
    """Standard deviation of each channel, of pixel values from 0 to 1; as many numbers as `mean` has."""
    crop: Crop = "auto"
    """How training images are cropped; "auto": "pad" where all images have the input's size, else "random_resized"."""
    flip: Annotated[Flip, one_of("flip", (True, False, "alternate"))] = True
    """Mirror each training image, left to right, with probability ½; "alternate": in every other epoch."""
    pad: Annotated[int, Field(ge=0, le=64)] = 4
    """With `crop = "pad"`: width of the black border around an image before the crop, in pixels."""
    threads: Annotated[Count | None, or_none()] = None
    """Threads per rank that read and decode; "none": the host's cores, shared by its ranks."""
    backend: Annotated[str, one_of("backend", BACKENDS)] = "cpu"
    """Which loader decodes the images."""
    order: Annotated[str, one_of("order", ORDERS)] = "full"
    """Order of the training images; "full": a uniform permutation; "blocks": large reads, each byte once per epoch."""
    area: Annotated[tuple[_Share, _Share], AfterValidator(_rising)] = (0.08, 1.0)
    """With `crop = "random_resized"`: least and greatest share of an image's area that a crop keeps."""
    mixup: FromZero = 0.0
    """α of mixup, which adds images in pairs; 0: none."""
    cutmix: FromZero = 0.0
    """α of CutMix, which replaces a rectangle of an image by another's; 0: none. With mixup: one of both per batch."""
    eval_size: Annotated[_Size | None, or_none()] = None
    """Side of the square input in evaluations, in pixels; "none": `size`."""
    start_size: Annotated[_Size | None, or_none()] = None
    """Side of the input at the beginning of the run, from which it grows to `size`; "none": it does not grow."""
    grow: Annotated[tuple[Fraction, Fraction], AfterValidator(_rising)] = (0.4, 0.8)
    """Fractions of the epochs between which the input grows."""
    size_step: Count = 4
    """The sizes between `start_size` and `size` are multiples of it, in pixels."""
    cache: Annotated[_Folder | None, or_none()] = None
    """Folder on each node to which the data set is staged before training; "none": no staging."""
    io: Annotated[Io | None, or_none()] = None
    """How shards are read; "cached": through the page cache; "mmap": memory-mapped; "direct": with O_DIRECT."""
    block_mib: Annotated[Count | None, or_none()] = None
    """With `order = "blocks"`: size of a block, in MiB."""
    max_bad: Annotated[_CountFromZero | None, or_none()] = None
    """Number of unreadable images that each rank tolerates, in training and in validation; one more is an error."""
    retries: Annotated[_CountFromZero | None, or_none()] = None
    """How often an open or a read that fails is tried again."""
    timeout_s: Annotated[Positive | None, or_none()] = None
    """How long a batch, or opening the data set, may take, in seconds; longer is an error."""

    def loader_settings(self) -> dict[str, Any]:
        """Return those arguments of `open_loader` that the recipe does not leave to it."""
        names = ("threads", "backend", "cache", "io", "block_mib", "max_bad", "retries", "timeout_s")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def size_at(self, epoch: int, epochs: int) -> int:
        """Return the side of the input in one epoch of the run, from 0, in pixels."""
        if self.start_size is None:
            return self.size
        begin, end = (share * epochs for share in self.grow)
        if epoch >= end:
            return self.size
        grown = max(0.0, epoch - begin) / (end - begin) if end > begin else 0.0
        between = self.start_size + grown * (self.size - self.start_size)
        return self.start_size if not grown else max(self.start_size, int(between // self.size_step) * self.size_step)

    @model_validator(mode="after")
    def _fits_together(self) -> Data:
        if self.start_size is not None and self.start_size > self.size:
            raise ValueError(f"start_size = {self.start_size}: must be at most size = {self.size}")
        for name in ("start_size", "eval_size") if self.backend == "resident" else ():
            if getattr(self, name) not in (None, self.size):
                raise ValueError(f'{name} must be "none" with backend = "resident", which scales no images')
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; one per channel")
        return self


class Model(Section):
    """Which network is trained."""

    name: Annotated[str, one_of("model", tuple(models.REGISTRY))]
    """Name of the network."""
    num_classes: Annotated[Count | None, or_none()] = None
    """Number of outputs; "none": the number of classes of the data set."""
    blur_pool: bool = False
    """Blur before pixels are dropped, in pooling and in convolutions with a stride (Zhang 2019)."""


class Train(Section):
    """How long, in which steps, and in which arithmetic the network is trained."""

    epochs: Count
    """How often the run goes through the training images, at most."""
    batch_size: Count
    """Images per step, over all ranks; a multiple of the number of ranks."""
    accumulation_steps: Count = 1
    """Parts in which a rank computes its images of a step, one after another, to need less memory; gradients are sent
    once. Batch normalisation sees a part at a time."""
    gradient_dtype: Annotated[str, one_of("gradient_dtype", GRADIENT_DTYPES)] = "float32"
    """Type in which the ranks send each other gradients; "bfloat16": half as many bytes, rounded to 8 bits."""
    bucket_mib: Count = 25
    """Size of the parts in which gradients are sent, each as soon as it is complete, in MiB."""
    static_graph: bool = False
    """Promise DDP that each step uses the same parameters in the same order, which saves it work."""
    powersgd_rank: Annotated[Count | None, or_none()] = None
    """Rank of the two narrow matrices that are sent in place of a layer's gradient (PowerSGD, Vogels et al. 2019);
    "none": gradients are sent whole."""
    powersgd_start_step: Annotated[int, Field(ge=2)] = 1000
    """Step from which PowerSGD is used, counted from where a process begins; gradients are sent whole before."""
    precision: Literal["auto", "bf16", "fp16", "tf32", "off"] = "auto"
    """Arithmetic of the forward pass; "auto": "bf16" where the device computes in it natively; "fp16" on GPUs that only
    have tensor cores for that (V100, T4), unless with PowerSGD; else "off" (float32).

    "fp16", with loss scaling, and "tf32", float32 of which products keep 10 bits, need a GPU.
    """
    channels_last: bool = True
    """Keep images and weights with the channels last in memory."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the network with `torch.compile`; "auto": on a GPU, in a run of 10,000 steps or more, without K-FAC.

    Where it fails, or "auto" does without on a GPU, the network is trained as it is, and the log says why.
    """
    compile_mode: Annotated[str, one_of("mode", COMPILE_MODES)] = "default"
    """How it is compiled; "reduce-overhead": with CUDA graphs, which launch all kernels of a pass at once;
    "max-autotune": also with the fastest of several kernels, which takes minutes to find."""
    deterministic: bool = False
    """Choose only kernels that give the same bits each time, which are slower. A run that is resumed then ends with the
    bits of one that never stopped, on a GPU as well; on a CPU it always does."""
    loss: Annotated[str, one_of("loss", LOSSES)] = "cross_entropy"
    """What is minimised; "bce": the sum over classes of binary cross-entropies."""
    label_smoothing: BelowOne = 0.0
    """Probability that is taken from the label's class and shared by all classes."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the weights, the order, the crops and the flips."""
    target_accuracy: Annotated[Annotated[float, Field(gt=0, le=1)] | None, or_none()] = None
    """Stop when this fraction of the validation images is classified correctly; "none": train for all epochs."""
    evaluate_every: Count = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    evaluate_mirrored: bool = False
    """Evaluate each image and its mirror image, and take the mean of their logits."""
    precise_bn_batches: _CountFromZero = 0
    """Training batches per rank from which the running statistics are estimated before an evaluation; 0: those of
    training are used."""
    checkpoint_every_steps: Annotated[Count | None, or_none()] = None
    """Steps between checkpoints within an epoch, beside those by time; "none": none."""
    checkpoint_every_minutes: Annotated[Annotated[float, Field(gt=0)] | None, or_none()] = 10.0
    """Minutes between checkpoints within an epoch; "none": at the ends of epochs, and by steps."""
    keep_checkpoints: Count = 2
    """How many of the last checkpoints are kept, in case the last one is damaged. That of the best epoch is, too."""
    failed_checkpoints: Annotated[int, Field(ge=0)] = 3
    """How many checkpoints in a row may fail, as on a full disk, before the run ends."""
    check_replicas_every_steps: Annotated[Count | None, or_none()] = 1000
    """Steps between comparisons of all ranks' parameters, which find bits that memory has changed; "none": none."""
    when_diverged: Annotated[str, one_of("policy", POLICIES)] = "stop"
    """What to do after a loss that is not finite, or a spike; "stop": end with an error; "skip": leave the step out;
    "roll_back": continue from the last checkpoint with a lower learning rate.

    With "skip" the host waits for each step, and its loss is known on all ranks, before the parameters are updated.
    """
    spike_factor: Annotated[Annotated[float, Field(gt=1)] | None, or_none()] = None
    """How many times the median loss of the last 100 steps a loss must be to count as a spike; "none": spikes are not
    looked for."""
    max_recoveries: Count = 10
    """How many steps are skipped, or how often the run is rolled back, before it ends with an error."""
    roll_back_lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """By which the learning rate is multiplied each time that the run is rolled back."""
    log_every: Count = 50
    """Steps between lines of metrics.jsonl."""

    @model_validator(mode="after")
    def _fits_together(self) -> Train:
        if self.compile_mode != "default" and self.compile is not True:
            raise ValueError(f'compile_mode = "{self.compile_mode}" needs compile = true')
        if self.compile_mode == "max-autotune" and self.deterministic:
            raise ValueError(
                'compile_mode = "max-autotune" chooses kernels by their speed, not with deterministic = true'
            )
        if self.compile_mode != "default" and self.accumulation_steps > 1:
            raise ValueError(
                f'compile_mode must be "default" with accumulation_steps = {self.accumulation_steps}: each pass of a '
                "CUDA graph overwrites the gradients of the one before"
            )
        for name, refused in NOT_WITH_POWERSGD.items() if self.powersgd_rank is not None else ():
            if (value := getattr(self, name)) in refused:
                raise ValueError(f'powersgd_rank must be "none" with {name} = "{value}"')
        return self
