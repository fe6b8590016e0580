"""Python processes that start in milliseconds: a server that has imported what takes seconds forks each of them.

Each is a process of its own, which from then on does what `python ARGUMENTS` does: with its own environment, pipes,
signals and exit code. If the start or the end of an interpreter is what a test is about, use `subprocess` instead: for
what is imported, how much memory is needed, what takes modules down, an encoding or another variable that Python reads
as it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

ROOT = Path(__file__).parents[1]
PACKAGES = "trainer.run.run", "trainer.reporting.page", "trainer.models.resnet", "pytorch_optimizer"
PACKAGES += tuple(f"matplotlib.backends.backend_{kind}" for kind in ("agg", "pdf", "svg"))
PACKAGES += (
    "datapipe.packing",
    "datapipe.cli",
    "datapipe.staging.exchange",
    "datapipe.loaders",
    "trainer.cli",
    "PIL.Image",
)
READ_AT_START = "PYTHON", "LC_", "LANG"  # first letters of the variables
MAX_REQUEST_BYTES = 2**20
CLONE_NEWUTS = 0x0400_0000  # of <sched.h>: host names of its own
# What a launcher tells the processes that it starts, and so the tests if they are in a job.
OF_LAUNCHERS = "SLURM_", "SBATCH_", "PBS_", "OMPI_", "PMI", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_"
OF_LAUNCHERS += "LSB_", "JOB_ID", "SGE_"
OF_LAUNCHERS += "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the environment of these tests, without GPUs and what has launched them, and with `changes`.

    This checkout is imported first, then what PYTHONPATH has: packages may lie there that are not installed.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""} | changes


class Process:
    """A process that a server has forked, with the attributes and methods of `subprocess.Popen`."""

    def __init__(self, server: ProcessServer, args: list[str], pid: int, pipes: Sequence[io.TextIOWrapper]) -> None:
        self.args, self.pid, self._server = args, pid, server
        self.stdin, self.stdout, self.stderr = pipes
        self._exit_code: int | None = None
        self._handle = os.pidfd_open(pid)
        self._texts: dict[int, str] = {}
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended. Until its exit code was asked for, no other has its number."""
        if self._exit_code is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        if self._exit_code is None and select.select([self._handle], [], [], timeout)[0]:
            self._exit_code = self._server.ask({"wait": self.pid})
            os.close(self._handle)
        return self._exit_code

    @property
    def is_over(self) -> bool:
        """Whether it has been waited for, and its pipes are closed."""
        streams = self.stdin, self.stdout, self.stderr
        return self._exit_code is not None and all(stream is None or stream.closed for stream in streams)

    @property
    def returncode(self) -> int | None:
        return self._exit_code

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Return all that it prints from now on, once it and its children have ended or closed the pipes."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(input or "")
                self.stdin.close()
        if not self._readers:
            streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
            self._readers = [threading.Thread(target=self._read, args=[one], daemon=True) for one in streams]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if deadline is None else max(0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout, *self._said())
        self.wait(None if deadline is None else max(0, deadline - time.monotonic()))
        self._close()
        return self._said()

    def _read(self, stream: io.TextIOWrapper) -> None:
        self._texts[id(stream)] = stream.read()

    def _said(self) -> tuple[str, str]:
        return self._texts.get(id(self.stdout), ""), self._texts.get(id(self.stderr), "")

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Ranks:
    """Several of them as one, which has failed if one has."""

    def __init__(self, ranks: Sequence[Process | subprocess.Popen]) -> None:
        self._ranks = ranks

    def send_signal(self, number: int) -> None:
        for rank in self._ranks:
            rank.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        codes = [rank.poll() for rank in self._ranks]
        return None if None in codes else next(filter(None, codes), 0)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        deadline = None if timeout is None else time.monotonic() + timeout
        said = [rank.communicate(timeout=deadline and max(0, deadline - time.monotonic())) for rank in self._ranks]
        return "".join(out for out, _ in said), "".join(err for _, err in said)


class ProcessServer:
    """The server, as its clients see it. Its processes are killed when it is closed."""

    def __init__(self, server: subprocess.Popen, connection: socket.socket, env: Mapping[str, str]) -> None:
        self.pid, self._server, self._connection = server.pid, server, connection
        self._environments = env, dict(os.environ)
        self._lock = threading.Lock()
        self._processes: list[Process] = []

    def ask(self, request: dict, files: Sequence[int] = ()) -> int:
        """Return the server's answer: the number of a new process, or the exit code of one that has ended."""
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], files)
            answer = self._connection.recv(64)
        if not answer:
            raise ConnectionError(f"the server of processes has ended, with {self._server.wait()}")
        return int(answer)

    def differing_at_start(self, env: Mapping[str, str]) -> list[str]:
        """Return the names of variables that Python reads as it starts, with other values than the server's or ours."""
        names = {name for known in (env, *self._environments) for name in known if name.startswith(READ_AT_START)}
        return sorted(name for name in names if env.get(name) not in [known.get(name) for known in self._environments])

    def start(
        self,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        host: str = "",
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | io.IOBase | None = subprocess.PIPE,
        stderr: int | io.IOBase | None = subprocess.PIPE,
        reports: bool = False,
    ) -> Process:
        """Start `python ARGUMENTS`, which are "-m", "-c" or a file and what follows it.

        Args:
            arguments: Words of the command line.
            env: Its whole environment; None: that of the tests.
            cwd: Folder to start in; None: that of the tests.
            host: Host name that it sees, in a namespace of its own; "": the machine's.
            stdin: As in `subprocess.Popen`, and so are `stdout` and `stderr`. Pipes are read as text.
            reports: Whether a training ends with its real report, which takes longer than trainings in tests do.

        Raises:
            ValueError: A variable that Python reads as it starts has another value than when the server started.
        """
        env = dict(os.environ if env is None else env)
        if names := self.differing_at_start(env):
            raise ValueError(f"a forked process cannot follow other values of {', '.join(names)}: use subprocess")
        words = [os.fspath(word) if isinstance(word, bytes) else str(word) for word in arguments]
        pipes: list[io.TextIOWrapper | None] = []
        with contextlib.ExitStack() as ends:
            files = []
            for number, end in enumerate((stdin, stdout, stderr)):
                pipe = None
                if end == subprocess.PIPE:
                    reading, writing = os.pipe()
                    ours, theirs = (writing, reading) if number == 0 else (reading, writing)
                    pipe = os.fdopen(ours, "w" if number == 0 else "r", errors="surrogateescape")
                    ends.callback(os.close, theirs)
                elif end == subprocess.DEVNULL:
                    theirs = os.open(os.devnull, os.O_RDWR)
                    ends.callback(os.close, theirs)
                elif end == subprocess.STDOUT:
                    theirs = files[1]
                else:
                    theirs = number if end is None else end if isinstance(end, int) else end.fileno()
                files.append(theirs)
                pipes.append(pipe)
            request = {
                "arguments": words,
                "env": env,
                "cwd": os.fspath(cwd or os.getcwd()),
                "host": host,
                "reports": reports,
            }
            process = Process(self, words, self.ask(request, files), pipes)
            with self._lock:
                self._processes = [*(known for known in self._processes if not known.is_over), process]
        return process

    def run(
        self, *arguments: object, input: str | None = None, timeout: float = 300, check: bool = False, **options
    ) -> subprocess.CompletedProcess:
        """Do what `subprocess.run` does, which captures all that is printed."""
        if input is not None:
            options["stdin"] = subprocess.PIPE
        process = self.start(*arguments, **options)
        try:
            said = process.communicate(input, timeout)
        finally:
            process.kill()
        done = subprocess.CompletedProcess(process.args, process.wait(), *said)
        if check:
            done.check_returncode()
        return done

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process._close()
        self._connection.close()
        self._server.wait()


@contextlib.contextmanager
def open_server(env: Mapping[str, str], cwd: Path = ROOT, prefix: Sequence[str] = ()) -> Iterator[ProcessServer]:
    """Have a server. `prefix`: a command that becomes the one after it, such as one that gives it a mount namespace."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
    command = [*prefix, sys.executable, __file__, str(theirs.fileno())]
    with subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        server = ProcessServer(process, ours, env)
        try:
            yield server
        finally:
            server.close()


def serve(connection: socket.socket) -> None:
    """Answer requests until the tests close the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of the terminal's is for the tests
    for name in PACKAGES:
        __import__(name)
    gc.collect()
    gc.freeze()  # what is here stays, so no process copies its pages to count its references
    while True:
        message, files, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                leave(functools.partial(become, files, **request))
        connection.send(str(answer).encode())
        for file in files:
            os.close(file)


def leave(work: Callable[[], None]) -> NoReturn:
    """Do it and end with Python's exit code, after what was to be done at the end.

    All modules are left as they are: taking them down takes 0.3 s.
    """
    code: object = 0
    is_interrupted = False
    try:
        work()
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        code = 1
        is_interrupted = isinstance(error, KeyboardInterrupt)
        sys.excepthook(*sys.exc_info())
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # waits for threads, as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError as error:
            code = 120
            with contextlib.suppress(OSError):
                print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr)
    if is_interrupted:  # of which Python dies in the end
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def skip_report(out: Path) -> Path:
    """Take the place of the report that each training ends with."""
    (out / "report.html").write_text("Tests that read a report ask for it.\n")
    return out / "report.html"


def become(files: list[int], arguments: list[str], env: dict[str, str], cwd: str, host: str, reports: bool) -> None:
    """Do what Python does with these arguments."""
    np.random.seed()  # or all have the server's numbers; `random` does so by itself
    if not reports:
        import trainer.run.run

        trainer.run.run.report_run = skip_report
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if host:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "no host name of its own")
        socket.sethostname(host)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if "OMP_NUM_THREADS" in env:
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # which torch reads as it is imported
    match arguments:
        case ["-m", name, *_]:
            sys.argv = arguments[1:]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [path, *_]:
            sys.argv, sys.path[0] = arguments, str(Path(path).parent)
            runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
