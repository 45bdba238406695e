//! The process under attack: the test binary once more, echoing bytes through the library's own calls.
//!
//! It listens twice: connections of the first port get a blocking thread each, those of the second share
//! one epoll loop. A panic in any thread aborts the process, as it would in production.

use std::collections::HashMap;
use std::io::BufRead;
use std::mem::{size_of, zeroed};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, epoll_event, iovec, pollfd, sockaddr_in, timespec};
use smc_core::fds::{self, Entry};
use smc_core::posix;

/// Tells a process that it is a victim (`server`) or an honest client (`client <port>`).
pub(crate) const ROLE: &str = "XSMC_HOSTILE_ROLE";

const BUFFER: usize = 16 << 10;

/// Acts as the environment says, and never comes back.
pub(crate) fn run(role: &str) -> ! {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("victim: {info}");
        std::process::abort();
    }));
    // SAFETY: touches no memory. The process dies with the thread that started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    match role.strip_prefix("client ").map(str::parse) {
        Some(Ok(port)) => client(port),
        _ => server(),
    }
    std::process::exit(0)
}

fn server() {
    let ((blocking, first), (events, second)) = (listen(), listen());
    println!("\nREADY {first} {second}");
    std::thread::spawn(move || {
        loop {
            let fd = accept(blocking, 0);
            if fd >= 0 {
                std::thread::spawn(move || serve(fd));
            }
        }
    });
    std::thread::spawn(move || event_loop(events));
    for line in std::io::stdin().lock().lines() {
        if line.is_ok_and(|l| l == "fork") {
            println!("FORKED {}", fork().as_millis());
        }
    }
}

/// Forks a child that ends at once; how long the parent was held up.
fn fork() -> Duration {
    let start = Instant::now();
    // SAFETY: the child does nothing but exit.
    let pid = posix::fork(|| unsafe { libc::fork() });
    if pid == 0 {
        // SAFETY: ends this process.
        unsafe { libc::_exit(0) };
    }
    let took = start.elapsed();
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    took
}

fn loopback(port: u16) -> sockaddr_in {
    // SAFETY: all-zero is a valid address.
    let mut a: sockaddr_in = unsafe { zeroed() };
    a.sin_family = libc::AF_INET as u16;
    a.sin_port = port.to_be();
    a.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    a
}

fn socket() -> c_int {
    let ty = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: touches no memory.
    posix::socket(libc::AF_INET, ty, 0, || unsafe {
        libc::socket(libc::AF_INET, ty, 0)
    })
}

fn listen() -> (c_int, u16) {
    let fd = socket();
    let mut a = loopback(0);
    let mut len = size_of::<sockaddr_in>() as u32;
    // SAFETY: `a` is an address of `len` bytes, writable for getsockname.
    unsafe {
        assert_eq!(libc::bind(fd, (&raw const a).cast(), len), 0);
        let e = fds::lookup(fd).expect("a TCP socket is known");
        assert_eq!(posix::listen(e, fd, 128, || libc::listen(fd, 128)), 0);
        assert_eq!(libc::getsockname(fd, (&raw mut a).cast(), &mut len), 0);
    }
    (fd, u16::from_be(a.sin_port))
}

fn accept(lfd: c_int, flags: c_int) -> c_int {
    let flags = flags | libc::SOCK_CLOEXEC;
    // SAFETY: no address is asked for.
    posix::accept(lfd, fds::lookup(lfd), flags, || unsafe {
        libc::accept4(lfd, std::ptr::null_mut(), std::ptr::null_mut(), flags)
    })
}

fn close(fd: c_int) {
    // SAFETY: the callers own `fd`.
    let real = || unsafe { libc::close(fd) };
    posix::close(fds::lookup(fd), fd, real);
}

/// recv(2), or with `how` another way to the same bytes.
fn take(fd: c_int, buf: &mut [u8], flags: c_int, how: usize) -> isize {
    let (p, len) = (buf.as_mut_ptr().cast::<c_void>(), buf.len());
    let Some(e) = fds::lookup(fd) else {
        // SAFETY: `p` is writable for `len` bytes.
        return unsafe { libc::recv(fd, p, len, flags) };
    };
    match how % 6 {
        1 => {
            let peek = flags | libc::MSG_PEEK;
            // SAFETY: `p` is writable for `len` bytes.
            unsafe { posix::recv(e, fd, p, len, peek, || libc::recv(fd, p, len, peek)) };
        }
        2 => {
            let mut set = [pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            }];
            let mut wait = timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            if flags & libc::MSG_DONTWAIT != 0 {
                wait.tv_sec = 0;
            }
            let (s, w) = (set.as_mut_ptr(), &raw const wait);
            // SAFETY: one writable pollfd and a readable timeout.
            unsafe {
                posix::poll(s, 1, w, std::ptr::null(), || {
                    libc::ppoll(s, 1, w, std::ptr::null())
                })
            };
        }
        3 => {
            let mut n: c_int = 0;
            let at = &raw mut n;
            for request in [libc::FIONREAD, libc::TIOCOUTQ] {
                // SAFETY: both requests store one int.
                unsafe {
                    posix::ioctl(e, fd, request, at as usize, || libc::ioctl(fd, request, at))
                };
            }
        }
        4 if flags == 0 => {
            let (a, b) = buf.split_at_mut(len / 3);
            let iov = [a, b].map(|half| iovec {
                iov_base: half.as_mut_ptr().cast(),
                iov_len: half.len(),
            });
            let l = iov.as_ptr();
            // SAFETY: two writable halves of the buffer.
            return unsafe { posix::readv(e, fd, l, 2, || libc::readv(fd, l, 2)) };
        }
        _ => {}
    }
    // SAFETY: `p` is writable for `len` bytes.
    unsafe { posix::recv(e, fd, p, len, flags, || libc::recv(fd, p, len, flags)) }
}

fn put(fd: c_int, buf: &[u8], flags: c_int) -> isize {
    let (p, len) = (buf.as_ptr().cast::<c_void>(), buf.len());
    let flags = flags | libc::MSG_NOSIGNAL;
    // SAFETY: `p` is readable for `len` bytes.
    let real = || unsafe { libc::send(fd, p, len, flags) };
    match fds::lookup(fd) {
        // SAFETY: as above.
        Some(e) => unsafe { posix::send(e, fd, p, len, flags, real) },
        None => real(),
    }
}

/// Moves what there is from the socket to `pipe`, and back to the socket. The bytes moved; 0 or less: the end.
fn splice(fd: c_int, pipe: [c_int; 2]) -> isize {
    let null = std::ptr::null_mut;
    let go = |from, to, len| {
        // SAFETY: no offsets are given.
        unsafe {
            posix::splice(from, null(), to, null(), len, 0, || {
                libc::splice(from, null(), to, null(), len, 0)
            })
        }
    };
    let n = go(fd, pipe[1], 4096);
    let mut left = n;
    while left > 0 {
        match go(pipe[0], fd, left as usize) {
            k if k > 0 => left -= k,
            _ => return -1,
        }
    }
    n
}

/// A pipe of a thread's own.
fn pipe() -> [c_int; 2] {
    let mut ends = [0; 2];
    // SAFETY: pipe2 fills the array.
    let r = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(r, 0);
    ends
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn serve(fd: c_int) {
    let (mut buf, pipe) = (vec![0u8; BUFFER], pipe());
    'stream: for turn in 0.. {
        if turn % 8 == 5 {
            if splice(fd, pipe) <= 0 {
                break;
            }
            continue;
        }
        let n = match take(fd, &mut buf, 0, turn) {
            n if n > 0 => n as usize,
            _ => break,
        };
        let mut done = 0;
        while done < n {
            match put(fd, &buf[done..n], 0) {
                k if k > 0 => done += k as usize,
                _ => break 'stream,
            }
        }
    }
    for fd in [fd, pipe[0], pipe[1]] {
        close(fd);
    }
}

fn control(ep: c_int, op: c_int, fd: c_int, events: c_int) {
    let mut ev = epoll_event {
        events: events as u32,
        u64: fd as u64,
    };
    let ev = &raw mut ev;
    // SAFETY: `ev` is a readable epoll_event.
    unsafe { posix::epoll_ctl(ep, op, fd, ev, || libc::epoll_ctl(ep, op, fd, ev)) };
}

fn wait(ep: c_int, evs: &mut [epoll_event]) -> usize {
    let (p, n) = (evs.as_mut_ptr(), evs.len() as c_int);
    // SAFETY: `n` writable events.
    let real = || unsafe { libc::epoll_wait(ep, p, n, -1) };
    let r = match fds::lookup(ep) {
        // SAFETY: as above; no timeout and no mask.
        Some(e @ Entry::Set(_)) => unsafe {
            posix::epoll_wait(e, ep, p, n, std::ptr::null(), std::ptr::null(), real)
        },
        _ => real(),
    };
    r.max(0) as usize
}

fn event_loop(lfd: c_int) {
    // SAFETY: touches no memory.
    let ep = posix::epoll_create(|| unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) });
    control(ep, libc::EPOLL_CTL_ADD, lfd, libc::EPOLLIN);
    let mut waiting: HashMap<c_int, Vec<u8>> = HashMap::new();
    let mut evs = [epoll_event { events: 0, u64: 0 }; 32];
    let mut buf = vec![0u8; BUFFER];
    for turn in 0.. {
        let n = wait(ep, &mut evs);
        for ev in evs.iter().take(n) {
            let (fd, events) = (ev.u64 as c_int, ev.events as c_int);
            if fd == lfd {
                let fd = accept(lfd, libc::SOCK_NONBLOCK);
                if fd >= 0 {
                    control(ep, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN);
                    waiting.insert(fd, Vec::new());
                }
                continue;
            }
            let Some(pending) = waiting.get_mut(&fd) else {
                continue;
            };
            if !step(fd, events, pending, &mut buf, turn) {
                waiting.remove(&fd);
                close(fd);
                continue;
            }
            let want = if pending.is_empty() {
                libc::EPOLLIN
            } else {
                libc::EPOLLOUT
            };
            control(ep, libc::EPOLL_CTL_MOD, fd, want);
        }
    }
}

/// Serves one event of a connection. False: it has ended.
fn step(fd: c_int, events: c_int, pending: &mut Vec<u8>, buf: &mut [u8], turn: usize) -> bool {
    if pending.is_empty() {
        match take(fd, buf, libc::MSG_DONTWAIT, turn) {
            n if n > 0 => pending.extend_from_slice(&buf[..n as usize]),
            -1 if errno() == libc::EAGAIN => {}
            _ => return false,
        }
    } else if events & (libc::EPOLLERR | libc::EPOLLHUP) == libc::EPOLLERR | libc::EPOLLHUP {
        return false;
    }
    while !pending.is_empty() {
        match put(fd, pending, libc::MSG_DONTWAIT) {
            n if n > 0 => drop(pending.drain(..n as usize)),
            -1 if errno() == libc::EAGAIN => break,
            _ => return false,
        }
    }
    true
}

/// Echoes random lengths on a few connections of its own, and checks what comes back.
fn client(port: u16) {
    let until = Instant::now() + Duration::from_secs(3);
    let threads: Vec<_> = (0..3u64)
        .map(|i| std::thread::spawn(move || client_stream(port, i, until)))
        .collect();
    let rounds: u64 = threads
        .into_iter()
        .map(|t| t.join().expect("a client thread"))
        .sum();
    println!("\nHONEST {rounds}");
}

fn client_stream(port: u16, seed: u64, until: Instant) -> u64 {
    let fd = socket();
    let (a, len) = (loopback(port), size_of::<sockaddr_in>() as u32);
    let p = (&raw const a).cast();
    let e = fds::lookup(fd).expect("a TCP socket is known");
    // SAFETY: `a` is a readable address of `len` bytes.
    let r = unsafe { posix::connect(e, fd, p, len, || libc::connect(fd, p, len)) };
    assert_eq!(r, 0, "connect: {}", errno());
    let (mut rng, mut buf, mut rounds) = (crate::rng::Rng::new(seed), vec![0u8; BUFFER], 0);
    while Instant::now() < until {
        let data = rng.bytes(1 + rng.clone().below(8000));
        assert_eq!(
            put(fd, &data, 0),
            data.len() as isize,
            "send: errno {}",
            errno()
        );
        let mut got = 0;
        while got < data.len() {
            let n = take(fd, &mut buf[got..data.len()], 0, 0);
            assert!(n > 0, "recv: {n}, errno {}", errno());
            got += n as usize;
        }
        assert_eq!(buf[..got], data[..], "an honest stream was damaged");
        rounds += 1;
    }
    close(fd);
    rounds
}
