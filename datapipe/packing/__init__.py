"""Pack a raw data set into shards: planned purely, written in parallel, by one process or many."""

from .job import PackOptions, PackResult, convert, finish, finish_conversion, pack

__all__ = ["PackOptions", "PackResult", "convert", "finish", "finish_conversion", "pack"]
