"""S: signals and unwinding."""

import fcntl
import os
import select
import signal
import socket
import time

from harness import services
from harness.behave import check, loaded, modes
from harness.net import *


def _raw(function, *arguments):
    """A C call without Python's repetition after EINTR: (value, error number)."""
    ctypes.set_errno(0)
    value = function(*arguments)
    return value, ctypes.get_errno()


@check()
def test_S1_interrupted(t):
    """EINTR without SA_RESTART; with it calls go on; with a socket timeout set always EINTR."""
    c = t.pair()
    listener = listen()
    hits = []
    signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    buffer = ctypes.create_string_buffer(100)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 100)
    header = (ctypes.c_size_t * 7)(0, 0, ctypes.addressof(vector), 1, 0, 0, 0)
    calls = {"recv": lambda: _raw(libc.recv, c.fileno(), buffer, 100, 0),
             "read": lambda: _raw(libc.read, c.fileno(), buffer, 100),
             "recvmsg": lambda: _raw(libc.recvmsg, c.fileno(), header, 0),
             "accept": lambda: _raw(libc.accept, listener.fileno(), None, None)}
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)
    pollfd = (ctypes.c_int * 2)(c.fileno(), 1)
    waits = {"epoll_wait": lambda: _raw(libc.epoll_wait, epoll.fileno(), buffer, 1, 5000),
             "poll": lambda: _raw(libc.poll, pollfd, 1, 5000)}

    def alarm(restart, call, seconds=0.1):
        signal.siginterrupt(signal.SIGALRM, not restart)
        before = len(hits)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = call()
        assert len(hits) == before + 1, "no signal came"
        return answer
    for name, call in {**calls, **waits}.items():
        assert alarm(False, call) == (-1, errno.EINTR), name
    for name, call in waits.items():
        assert alarm(True, call) == (-1, errno.EINTR), name
    for name, call in calls.items():
        if name == "accept":
            t.start("time.sleep(0.3)\nd = connect(address)", address=listener.getsockname())
        else:
            t.start("time.sleep(0.3)\nc.send(b'later')")
        value, number = alarm(True, call)
        assert value >= 0, (name, number)
        if name != "accept":
            assert value == 5 and buffer.raw[:5] == b"later", (name, value)
        t.join()
    for sock in (c, listener):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(3))
    for name, call in calls.items():
        assert alarm(True, call) == (-1, errno.EINTR), name
    block = ctypes.create_string_buffer(16 << 20)
    value, number = alarm(False, lambda: _raw(libc.send, c.fileno(), block, len(block), 0), 0.3)
    assert 0 < value < len(block) or (value, number) == (-1, errno.EINTR), (value, number)
    if value > 0:
        t.peer("recv_exact(c, value) and None", value=value)
    c.sendall(b"on")
    assert t.peer("recv_exact(c, 2)") == b"on"


@check()
def test_S1_to_the_process(t):
    """A signal to a process with several threads interrupts the call of its first thread, as it does on TCP."""
    import threading
    c = t.pair()
    hits = []
    buffer = ctypes.create_string_buffer(100)
    signal.signal(signal.SIGUSR1, lambda *_: hits.append(threading.current_thread()))
    idle = [threading.Thread(target=time.sleep, args=(8,), daemon=True) for _ in range(3)]
    for thread in idle:
        thread.start()
    # Alone, then beside a signal whose handler has calls go on.
    for both in (False, True):
        if both:
            signal.signal(signal.SIGUSR2, lambda *_: hits.append("restarting"))
            signal.siginterrupt(signal.SIGUSR2, False)
        bg(lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGUSR1)))
        assert _raw(libc.recv, c.fileno(), buffer, 100, 0) == (-1, errno.EINTR)
        assert hits.pop() is threading.main_thread()


@check()
def test_S1_both_kinds(t):
    """Where some handlers interrupt calls and others have them go on, each does what it should, at once."""
    import threading
    c = t.pair()
    seen = []
    buffer = ctypes.create_string_buffer(100)
    main = threading.main_thread().ident
    # In C, so that it runs as the signal comes; Python's own handlers run when the call is over.
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: seen.append(number))
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGUSR2), handler)
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def send():
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGUSR2)
        until(lambda: seen == [signal.SIGUSR2], 3, "the handler")
        signal.pthread_kill(main, signal.SIGUSR1)
    bg(send)
    assert _raw(libc.recv, c.fileno(), buffer, 100, 0) == (-1, errno.EINTR)
    assert seen == [signal.SIGUSR2]
    # Blocked by the thread itself and pending, that signal is in nobody's way.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.pthread_kill(main, signal.SIGUSR2)
    bg(lambda: (time.sleep(0.3), signal.pthread_kill(main, signal.SIGUSR1)))
    assert _raw(libc.recv, c.fileno(), buffer, 100, 0) == (-1, errno.EINTR)
    assert seen == [signal.SIGUSR2]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    assert seen == [signal.SIGUSR2] * 2


@check()
def test_S2_never_eintr_without_waiting(t):
    """Non-blocking reads without data say EAGAIN under 5000 signals a second."""
    c = t.pair()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    buffer = ctypes.create_string_buffer(10)
    end, count = time.monotonic() + 1.5, 0
    while time.monotonic() < end:
        for _ in range(50):
            assert _raw(libc.recv, c.fileno(), buffer, 10, socket.MSG_DONTWAIT) == (-1, errno.EAGAIN)
        count += 50
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert count > 1000


@check()
def test_S3_sigio(t):
    """SIGIO through O_ASYNC and F_SETOWN, set before or after connecting."""
    hits = []
    signal.signal(signal.SIGIO, lambda *_: hits.append(1))
    c = t.pair()
    fcntl.fcntl(c, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(c, fcntl.F_SETFL, fcntl.fcntl(c, fcntl.F_GETFL) | os.O_ASYNC)
    for _ in range(2):
        before = len(hits)
        t.peer("c.send(b'x')")
        until(lambda: len(hits) > before, 3, "SIGIO")
        assert c.recv(1) == b"x"
    t.peer("l = listen()")
    s = socket.socket()
    fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(s, fcntl.F_SETFL, fcntl.fcntl(s, fcntl.F_GETFL) | os.O_ASYNC)
    s.connect(tuple(t.peer("l.getsockname()")))
    t.peer("d = l.accept()[0]")
    for _ in range(50):
        time.sleep(0.002)
        before = len(hits)
        t.peer("d.send(b'x')")
        until(lambda: len(hits) > before, 3, "SIGIO")
        assert s.recv(1) == b"x"


def _signals(make_world, program, mode, what, status=0):
    world = make_world("eager")
    _, port = services.asyncio_echo(world, loaded(mode)[1])
    with world.watch(0.05) as watch:
        client = world.start([program("signals"), port, what], loaded(mode)[0])
        client.wait(20, status)
    assert "ok" in client.out, client.describe()
    if mode == "both":
        assert watch.most_on_rmb, f"nothing rode RMBs: {watch}"


@modes()
def test_S4_signals_untouched(make_world, program, mode):
    """Handlers, mask, alternate stack and timers are as the program left them; a raised SIGHUP kills."""
    _signals(make_world, program, mode, "untouched", -signal.SIGHUP)


@modes()
def test_S5_sockets_in_handlers(make_world, program, mode):
    """Handlers use sockets while the interrupted code is inside socket calls."""
    _signals(make_world, program, mode, "handler")


@modes()
def test_S6_cancellation(make_world, program, mode):
    """Blocked threads are cancelled, their cleanup handlers run once, sockets go on."""
    _signals(make_world, program, mode, "cancel")


@modes()
def test_S7_longjmp(make_world, program, mode):
    """A handler leaves blocked calls by siglongjmp; later calls on the same sockets work."""
    _signals(make_world, program, mode, "longjmp")
