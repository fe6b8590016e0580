"""Read pickles of dictionaries, lists, strings, numbers and numpy arrays, with an interpreter of their few opcodes.

Python's own unpickler calls the functions that a file names, and numpy's arrays trust the state that a file gives them.
Either may crash the process or run a stranger's code. Here a file can name a few functions, and none of them is called:
an `Array` keeps its arguments, and checks them when the array is asked for.

The opcodes: Python's Lib/pickletools.py. Protocols 0 to 5, of Python 2 (whose strings are read as Latin-1) and 3.
"""

from __future__ import annotations

import codecs
import pickle
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

MAX_OPCODES = 4_000_000  # each costs up to 200 bytes of memory; CIFAR-100 has 300,000
INTEGERS = frozenset("iu"), frozenset("1248")
# What a name in a pickle stands for.
NAMES = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): "array" for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "frombuffer" for core in ("core", "_core")},
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}


class Array:
    """A numpy array as a pickle describes it."""

    __slots__ = ("_state",)

    def __init__(self, state: Any = None) -> None:
        self._state = state  # as numpy.ndarray.__setstate__ takes it

    def array(self) -> np.ndarray:
        """Return the array of whole numbers. Raises ValueError for any other, or a wrong number of bytes."""
        match self._state:
            case (int(), tuple(shape), _DType(code=code), int(by_columns), bytes(data) | str(data)):
                data = data.encode("latin1") if isinstance(data, str) else data  # Python 2 wrote a str
                kind = np.dtype(code)
                if any(type(side) is not int or side < 0 for side in shape) or len(shape) > 2:
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
        if not (isinstance(code, str) and len(code) == 2 and code[0] in INTEGERS[0] and code[1] in INTEGERS[1]):
            raise ValueError("an array that is not one of whole numbers")
        self.code = code

    def set_state(self, state: Any) -> None:
        """Set the byte order. `state`: version, byte order, and what only other types have."""
        if not (isinstance(state, tuple) and len(state) >= 5 and state[1] in ("<", ">", "|", "=")):
            raise ValueError("an array of an unknown byte order")
        if any(part is not None for part in state[2:5]):
            raise ValueError("an array that is not one of whole numbers")
        self.code = state[1] + self.code[-2:]


class _Name:
    """A function that the file names."""

    __slots__ = ("name",)

    def __init__(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):  # a deep tuple could take for ever to print
            raise ValueError("names a function by what is not a string")
        if (module, name) not in NAMES:
            raise ValueError(f"asks for {module[:100]}.{name[:100]}, which no such file needs")
        self.name = NAMES[module, name]


def read_pickle(data: bytes) -> Any:
    """Read a pickle, its numpy arrays as `Array`. Raises ValueError when it holds anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # for escape sequences that Python does not know
            return _Reader(data).read()
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise ValueError(f"corrupt: {type(error).__name__}: {str(error)[:100]}") from error
    except ValueError as error:
        raise ValueError(str(error)[:200]) from error  # Python's message may quote the whole file
    except MemoryError as error:
        raise ValueError("too large for the memory") from error


class _Reader:
    """The interpreter: a stack, marks in it, and a memo."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # how high the stack was
        self._memo: dict[int, Any] = {}
        self._may_encode = len(data)  # characters: an encoded string is a copy, and the file may ask for it again

    def read(self) -> Any:
        for _ in range(MAX_OPCODES):
            opcode = self._read_bytes(1)
            if opcode == pickle.STOP:
                return self._stack.pop()
            self._step(opcode)
        raise ValueError(f"more than {MAX_OPCODES} opcodes")

    def _step(self, opcode: bytes) -> None:
        if opcode in CONSTANTS:
            self._stack.append(CONSTANTS[opcode]())
        elif opcode in NUMBERS:
            self._stack.append(self._number(NUMBERS[opcode]))
        elif opcode in STRINGS:
            size, make = STRINGS[opcode]
            self._stack.append(make(self._read_bytes(self._number(size))))
        elif opcode in LINES:
            self._stack.append(LINES[opcode](self._line()))
        elif opcode in TUPLES:
            count = TUPLES[opcode]
            self._stack.append(tuple(self._pop(count)))
        elif opcode in PUTS:
            self._memo[self._index(PUTS[opcode])] = self._stack[-1]
        elif opcode in GETS:
            self._stack.append(self._memo[self._index(GETS[opcode])])
        elif opcode in ACTIONS:
            ACTIONS[opcode](self)
        else:
            raise ValueError(f"the opcode {opcode!r}, which no such file needs")

    def _read_bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if not start <= self._at <= len(self._data):
            raise ValueError("truncated")
        return self._data[start : self._at]

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise ValueError("truncated")
        line, self._at = self._data[self._at : end], end + 1
        return line

    def _number(self, layout: str) -> int:
        return struct.unpack(layout, self._read_bytes(struct.calcsize(layout)))[0]

    def _index(self, layout: str | None) -> int:
        return int(self._line()) if layout is None else self._number(layout)

    def _pop(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self._stack):
            raise ValueError("an empty stack")
        values = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return values

    def _pop_to_mark(self) -> list[Any]:
        return self._pop(len(self._stack) - self._marks.pop())

    # --- opcodes ---

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _list(self) -> None:
        self._stack.append(self._pop_to_mark())

    def _tuple(self) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def _dict(self) -> None:
        values = self._pop_to_mark()
        self._stack.append({})
        self._set(values)

    def _append(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("appends to what is not a list")
        self._stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError("sets an item of what is not a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, bytes, int):  # the hash of a deep tuple overflows the C stack
                raise ValueError(f"a key of type {type(key).__name__}")
            target[key] = value

    def _global(self) -> None:
        module, name = self._line(), self._line()
        self._stack.append(_Name(module.decode("latin1"), name.decode("latin1")))

    def _stack_global(self) -> None:
        self._stack.append(_Name(*self._pop(2)))

    def _reduce(self) -> None:
        name, arguments = self._pop(2)
        if type(name) is not _Name or type(arguments) is not tuple:
            raise ValueError("calls what is not a function")
        if name.name == "array":
            self._stack.append(Array())
        elif name.name == "frombuffer":
            data, kind, shape, order = arguments
            self._stack.append(Array((1, shape, kind, order == "F", data)))
        elif name.name == "dtype":
            self._stack.append(_DType(arguments[0]))
        elif name.name == "encode" and len(arguments) == 2 and arguments[1] == "latin1":
            text = arguments[0]
            if type(text) is not str or len(text) > self._may_encode:
                raise ValueError("encodes what is not a string of its own")
            self._may_encode -= len(text)
            self._stack.append(text.encode("latin1"))
        else:
            raise ValueError(f"calls {name.name} otherwise than numpy does")

    def _build(self) -> None:
        (state,) = self._pop(1)
        target = self._stack[-1]
        if type(target) is Array:
            target._state = state
        elif type(target) is _DType:
            target.set_state(state)
        else:
            raise ValueError("gives a state to what has none")


def _integer(line: bytes) -> int | bool:
    """Parse an INT or LONG of protocol 0."""
    if line in (b"00", b"01"):
        return line == b"01"
    if len(line) > 20:
        raise ValueError("a number of too many digits")
    return int(line.removesuffix(b"L"))


def _quoted(line: bytes) -> str:
    line = line.strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("a string without its quotation marks")
    return codecs.escape_decode(line[1:-1])[0].decode("latin1")


def _little_endian(data: bytes) -> int:
    if len(data) > 8:
        raise ValueError("a number of too many bytes")
    return int.from_bytes(data, "little", signed=True)


def _latin1(data: bytes) -> str:
    return data.decode("latin1")


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


CONSTANTS: dict[bytes, Callable[[], Any]] = {
    pickle.NONE: lambda: None, pickle.NEWTRUE: lambda: True, pickle.NEWFALSE: lambda: False,
    pickle.EMPTY_LIST: list, pickle.EMPTY_DICT: dict, pickle.EMPTY_TUPLE: tuple,
}  # fmt: skip
NUMBERS = {pickle.BININT: "<i", pickle.BININT1: "<B", pickle.BININT2: "<H", pickle.BINFLOAT: ">d"}
# How the length is written, and what the bytes become.
STRINGS: dict[bytes, tuple[str, Callable[[bytes], Any]]] = {
    pickle.BINSTRING: ("<i", _latin1), pickle.SHORT_BINSTRING: ("<B", _latin1),
    pickle.SHORT_BINUNICODE: ("<B", _utf8), pickle.BINUNICODE: ("<I", _utf8), pickle.BINUNICODE8: ("<Q", _utf8),
    pickle.SHORT_BINBYTES: ("<B", bytes), pickle.BINBYTES: ("<I", bytes), pickle.BINBYTES8: ("<Q", bytes),
    pickle.BYTEARRAY8: ("<Q", bytes), pickle.LONG1: ("<B", _little_endian), pickle.LONG4: ("<i", _little_endian),
}  # fmt: skip
LINES: dict[bytes, Callable[[bytes], Any]] = {
    pickle.INT: _integer, pickle.LONG: _integer, pickle.FLOAT: float, pickle.STRING: _quoted,
    pickle.UNICODE: lambda line: line.decode("raw-unicode-escape"),
}  # fmt: skip
TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}
# How the number is written; None: as a line.
PUTS = {pickle.PUT: None, pickle.BINPUT: "<B", pickle.LONG_BINPUT: "<I"}
GETS = {pickle.GET: None, pickle.BINGET: "<B", pickle.LONG_BINGET: "<I"}
ACTIONS: dict[bytes, Callable[[_Reader], object]] = {
    pickle.PROTO: lambda reader: reader._read_bytes(1),
    pickle.FRAME: lambda reader: reader._read_bytes(8),  # how much may be read ahead
    pickle.MARK: _Reader._mark,
    pickle.POP: lambda reader: reader._pop(1),
    pickle.POP_MARK: _Reader._pop_to_mark,
    pickle.MEMOIZE: _Reader._memoize,
    pickle.LIST: _Reader._list,
    pickle.TUPLE: _Reader._tuple,
    pickle.DICT: _Reader._dict,
    pickle.APPEND: lambda reader: reader._append(reader._pop(1)),
    pickle.APPENDS: lambda reader: reader._append(reader._pop_to_mark()),
    pickle.SETITEM: lambda reader: reader._set(reader._pop(2)),
    pickle.SETITEMS: lambda reader: reader._set(reader._pop_to_mark()),
    pickle.GLOBAL: _Reader._global,
    pickle.STACK_GLOBAL: _Reader._stack_global,
    pickle.REDUCE: _Reader._reduce,
    pickle.BUILD: _Reader._build,
}
