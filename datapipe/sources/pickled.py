"""Read pickles of dictionaries, lists, strings, numbers and numpy arrays, and of nothing else.

Python's own unpickler calls the functions that a file names, and numpy's arrays trust the state that a file gives them.
Either may crash the process or run a stranger's code. Here Python's unpickler is left few of its opcodes, and what a
file may name are a few functions of this module. An `Array` keeps its state, and checks it when the array is asked for.

It is the unpickler that is written in Python: the one in C takes as much memory as a file asks for. Protocols 0 to 5,
of Python 2 (whose strings are read as Latin-1) and 3.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

MAX_OPCODES = 4_000_000  # each costs up to 200 bytes of memory; CIFAR-100 has 300,000
_MAX_SIDE = 1 << 40  # of an array
_INTEGERS = frozenset("iu"), frozenset("1248")
_ALLOWED = """
    PROTO FRAME STOP MARK POP POP_MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    BYTEARRAY8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    GLOBAL STACK_GLOBAL REDUCE BUILD
"""
_Unpickler: Any = vars(pickle)["_Unpickler"]


class Array:
    """A numpy array as a pickle describes it."""

    __slots__ = ("_state",)

    def __init__(self, state: Any = None) -> None:
        self._state = state

    def set_state(self, state: Any) -> None:
        """Set what `numpy.ndarray.__setstate__` takes."""
        self._state = state

    def array(self) -> np.ndarray:
        """Return the array of whole numbers. Raises ValueError for any other, or a wrong number of bytes."""
        match self._state:
            case (int(), tuple(shape), _DType(code=code), int(by_columns), bytes(data) | str(data)):
                data = data.encode("latin1") if isinstance(data, str) else data  # Python 2 wrote a str
                kind = np.dtype(code)
                if any(type(side) is not int or not 0 <= side < _MAX_SIDE for side in shape) or len(shape) > 2:
                    raise ValueError("an array of a shape that is not one or two numbers")
                size = kind.itemsize
                for side in shape:
                    size *= side
                if size != len(data):
                    raise ValueError(f"an array of {len(data)} bytes instead of {size}")
                return np.frombuffer(data, kind).reshape(shape, order="F" if by_columns else "C")
        raise ValueError("an array that is not one of whole numbers")


class _DType:
    """The type of an array's numbers: `code` as numpy writes it, with its byte order."""

    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        if not (isinstance(code, str) and len(code) == 2 and code[0] in _INTEGERS[0] and code[1] in _INTEGERS[1]):
            raise ValueError("an array that is not one of whole numbers")
        self.code = code

    def set_state(self, state: Any) -> None:
        """Set the byte order. `state`: version, byte order, and what only other types have."""
        if not (isinstance(state, tuple) and len(state) >= 5 and state[1] in ("<", ">", "|", "=")):
            raise ValueError("an array of an unknown byte order")
        if any(part is not None for part in state[2:5]):
            raise ValueError("an array that is not one of whole numbers")
        self.code = state[1] + self.code[-2:]


def read_pickle(data: bytes) -> Any:
    """Read a pickle, its numpy arrays as `Array`. Raises ValueError when it holds anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # for escape sequences that Python does not know
            return _Reader(data).load()
    except ValueError as error:
        raise ValueError(str(error)[:200]) from error  # Python's message may quote the whole file
    except MemoryError as error:
        raise ValueError("too large for the memory") from error
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        struct.error,
        OverflowError,
    ) as error:
        raise ValueError(f"truncated or corrupt: {type(error).__name__}: {str(error)[:100]}") from error


class _Reader(_Unpickler):
    """Python's unpickler, in which an opcode or a function that is not allowed raises ValueError."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._left = MAX_OPCODES
        self._may_encode = len(data)  # bytes: each string is a copy, and the file may ask for it again

    @property
    def dispatch(self) -> _Reader:
        """Where `load` looks up each opcode."""
        return self

    def __getitem__(self, opcode: int) -> Callable[[_Reader], None]:
        """Return what is done at an opcode."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {MAX_OPCODES} opcodes")
        if opcode not in _OPCODES:
            raise ValueError(f"the opcode {bytes([opcode])!r}, which no such file needs")
        return _OPCODES[opcode]

    def find_class(self, module: str, name: str) -> object:
        """Return what stands for a function that the file names."""
        match module, name:
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct":
                return lambda *_: Array()
            case "numpy.core.numeric" | "numpy._core.numeric", "_frombuffer":
                return lambda data, kind, shape, order: Array((1, shape, kind, order == "F", data))
            case "numpy", "dtype":
                return lambda code, *_: _DType(code)
            case "numpy", "ndarray":
                return None  # is only handed to `_reconstruct`
            case "_codecs", "encode":
                return self._encode
        raise ValueError(f"asks for {module[:100]}.{name[:100]}, which no such file needs")

    def _encode(self, text: Any, encoding: Any) -> bytes:
        if type(text) is not str or encoding != "latin1" or len(text) > self._may_encode:
            raise ValueError("encodes what is not a string of its own")
        self._may_encode -= len(text)
        return text.encode("latin1")

    # --- opcodes that the unpickler in Python trusts too much ---

    def load_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:  # a deep tuple could take for ever to print
            raise ValueError("names a function by what is not a string")
        self.append(self.find_class(module, name))

    def load_build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) not in (Array, _DType):
            raise ValueError("gives a state to what has none")
        self.stack[-1].set_state(state)

    def load_bytearray8(self) -> None:
        self.append(self.read(struct.unpack("<Q", self.read(8))[0]))

    def load_dict(self) -> None:
        values = self.pop_mark()
        self.append({})
        self._set(values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError("sets an item of what is not a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, bytes):  # the hash of a deep tuple overflows the C stack
                raise ValueError(f"a key of type {type(key).__name__}")
            target[key] = value


_OPCODES: dict[int, Callable[[_Reader], None]] = {
    opcode: getattr(_Reader, _Unpickler.dispatch[opcode].__name__)
    for opcode in (getattr(pickle, name)[0] for name in _ALLOWED.split())
}
