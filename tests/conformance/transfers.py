"""Programs that move files and fork or exec on each connection: rsync, ssh and git."""

import hashlib
import os
import pathlib
import pwd
import random

from harness.settings import scaled
from harness.world import free_port

from .suite import Suite


def suites():
    # sshd's sandboxed child uses the connection before its parent does, which leaves only a tunnel's to RMBs, and git
    # upload-pack's standard output is the connection: TCP alone serves that.
    return [Suite("rsync", rsync, ("rsync",), takes=10, all_pass=True),
            Suite("sshd", sshd, ("openssh-server", "openssh-client"), True, 30, True),
            Suite("git-daemon", git, ("git",), False, 15, True),
            Suite("vsftpd", vsftpd, ("vsftpd", "curl"), False, 15, True)]


def make_tree(top, files, largest, seed=1):
    """Files below a directory, one of them `largest` bytes long, whole MiB."""
    source = random.Random(seed)
    for number in range(files):
        path = top / f"d{number % 7}" / f"e{number % 3}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(source.randrange(20_000)))
    with open(top / "large", "wb") as large:
        for _ in range(largest >> 20):
            large.write(source.randbytes(1 << 20))


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(top):
    return {str(path.relative_to(top)): digest(path) for path in pathlib.Path(top).rglob("*") if path.is_file()
            and ".git" not in path.parts}


def same(way, *words, tree, copy):
    way.run(words, 90)
    assert digests(copy) == digests(tree), "the copy differs"


def rsync(way):
    """The daemon forks for each connection."""
    tree, inbox, port = way.directory / "tree", way.directory / "inbox", free_port()
    make_tree(tree, 300, 30 << 20)
    inbox.mkdir()
    config = way.directory / "rsyncd.conf"
    config.write_text(f"""
use chroot = no
uid = {os.getuid()}
gid = {os.getgid()}
pid file = {way.directory}/rsyncd.pid
[tree]
path = {tree}
[inbox]
path = {inbox}
read only = no
""")
    server = way.start(["rsync", "--daemon", "--no-detach", f"--port={port}", f"--config={config}", "--address=127.0.0.1"], port)
    url, out = f"rsync://127.0.0.1:{port}", way.directory / "out"
    way.case("pull", lambda: same(way, "rsync", "-a", f"{url}/tree/", out, tree=tree, copy=out))
    way.case("push", lambda: same(way, "rsync", "-a", f"{tree}/", f"{url}/inbox/", tree=tree, copy=inbox))
    # Other bytes of the same size in the middle: only by checksums does it find what has changed.
    with open(tree / "large", "r+b") as file:
        file.seek(10 << 20)
        file.write(random.Random(2).randbytes(1 << 20))
    way.case("delta-by-checksum", lambda: same(way, "rsync", "-ac", "--no-whole-file", f"{url}/tree/", out, tree=tree, copy=out))
    way.case("compressed-push", lambda: same(way, "rsync", "-acz", f"{tree}/", f"{url}/inbox/", tree=tree, copy=inbox))
    way.case("stops", way.stop, server)
    return way.outcomes


GUEST = 54321


def as_seen_with_guest(way, command):
    """A shell command in a mount namespace where a user of that name can log in, whom this machine doesn't have."""
    for directory in (way.directory.parent, way.directory):
        directory.chmod(0o755)
    binds = ""
    for name, entry in (("passwd", f"guest:x:{GUEST}:{GUEST}::/:/bin/sh"), ("shadow", "guest:*:20000::::::")):
        (way.directory / name).write_text(pathlib.Path("/etc", name).read_text() + entry + "\n")
        binds += f"mount --bind {way.directory}/{name} /etc/{name} && "
    return ["unshare", "--mount", "sh", "-c", binds + command]


def sshd(way):
    """Executes itself for each connection, and has the socket used by processes of less privilege, in a sandbox."""
    port = free_port()
    account = pwd.getpwuid(os.getuid()).pw_name
    for key in ("host", "user"):
        way.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    (way.directory / "user.pub").rename(way.directory / "authorized")
    config = way.directory / "sshd_config"
    config.write_text(f"""
Port {port}
ListenAddress 127.0.0.1
HostKey {way.directory}/host
PidFile {way.directory}/sshd.pid
AuthorizedKeysFile {way.directory}/authorized
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
UsePAM no
MaxStartups 50
Subsystem sftp internal-sftp
""")
    server = way.start(as_seen_with_guest(way, f"exec /usr/sbin/sshd -D -e -f {config}"), port)
    options = ["-F", "/dev/null", "-i", "user", "-o", f"UserKnownHostsFile={way.directory}/known", "-o",
               "StrictHostKeyChecking=no", "-o", "BatchMode=yes"]
    make_tree(way.directory / "tree", 30, scaled(150, 20) << 20)
    large, host = way.directory / "tree" / "large", f"{account}@127.0.0.1"

    def command():
        output = way.run(["ssh", *options, "-p", port, host, "echo", "hello"], 30)
        assert "hello" in output, output

    def copy(*words, through=port):
        way.run(["scp", *options, "-P", through, *words], 120)
        assert digest(way.directory / "copy") == digest(large), "the copy differs"
        (way.directory / "copy").unlink()

    def many():
        for _ in range(5):
            command()

    def another_user():
        output = way.run(["ssh", *options, "-p", port, "guest@127.0.0.1", "id", "-u"], 30)
        assert str(GUEST) in output.split(), output
        copy(f"guest@127.0.0.1:{large}", "copy")

    def tunnel():
        entrance = free_port()
        forward = way.start(["ssh", *options, "-p", port, "-N", "-L", f"127.0.0.1:{entrance}:127.0.0.1:{port}", host], entrance)
        copy(f"{host}:{large}", "copy", through=entrance)
        way.stop(forward)
    way.case("command", command)
    way.case("commands", many)
    way.case("another-user", another_user)
    way.case("scp-from", copy, f"{host}:{large}", "copy")
    way.case("scp-to", copy, large, f"{host}:{way.directory}/copy")
    way.case("scp-old-protocol", copy, "-O", large, f"{host}:{way.directory}/copy")
    way.case("scp-through-tunnel", tunnel)
    way.case("scp-tree", lambda: same(way, "scp", *options, "-q", "-r", "-P", port, f"{host}:{way.directory}/tree",
                                      "tree2", tree=way.directory / "tree", copy=way.directory / "tree2"))
    way.case("stops", way.stop, server)
    return way.outcomes


def git(way):
    """git daemon executes git upload-pack with the connection as its standard input and output."""
    tree, port = way.directory / "srv" / "tree", free_port()
    make_tree(tree, 200, 20 << 20)
    me = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], [*me, "commit", "-qm", "one"]):
        way.run(["git", *words], cwd=tree)
    server = way.start(["git", "daemon", f"--port={port}", "--listen=127.0.0.1", "--reuseaddr", "--export-all",
                        "--enable=receive-pack", f"--base-path={way.directory}/srv", way.directory / "srv"], port)
    clone = way.directory / "clone"
    way.case("clone", lambda: same(way, "git", "clone", "-q", f"git://127.0.0.1:{port}/tree", clone, tree=tree, copy=clone))
    way.case("shallow-clone", lambda: same(way, "git", "clone", "-q", "--depth=1", f"git://127.0.0.1:{port}/tree",
                                           way.directory / "shallow", tree=tree, copy=way.directory / "shallow"))

    def push():
        (clone / "large").write_bytes(random.Random(3).randbytes(8 << 20))
        for words in (["checkout", "-qb", "two"], [*me, "commit", "-qam", "two"], ["push", "-q", "origin", "two"]):
            way.run(["git", *words], 60, cwd=clone)
        way.run(["git", "checkout", "-q", "two"], 60, cwd=tree)
        assert digests(clone) == digests(tree), "what was pushed differs"
    way.case("push", push)
    way.case("fsck", lambda: way.run(["git", "fsck", "--full"], 60, cwd=tree))
    way.case("stops", way.stop, server)
    return way.outcomes


def vsftpd(way):
    """Several processes a session, of which those that move data belong to another user. (Its seccomp filter is older than
    today's C library, and kills it, plain as well.)"""
    port, root = free_port(), way.directory / "root"
    make_tree(root / "in", 20, scaled(60, 8) << 20)
    (root / "out").mkdir()
    (way.directory / "empty").mkdir()
    # What anonymous users may write to must not be the root, and belong to them.
    account = pwd.getpwnam("ftp")
    os.chown(root / "out", account.pw_uid, account.pw_gid)
    for directory in (way.directory.parent, way.directory):
        directory.chmod(0o755)
    config = way.directory / "vsftpd.conf"
    config.write_text(f"""
listen=YES
background=NO
listen_address=127.0.0.1
listen_port={port}
anonymous_enable=YES
no_anon_password=YES
anon_root={root}
anon_upload_enable=YES
write_enable=YES
anon_umask=022
local_enable=NO
seccomp_sandbox=NO
secure_chroot_dir={way.directory}/empty
vsftpd_log_file={way.directory}/vsftpd.log
connect_from_port_20=NO
""")
    server = way.start(["vsftpd", config], port)
    url, large = f"ftp://127.0.0.1:{port}", root / "in" / "large"

    def get(*options):
        way.run(["curl", "-sS", "-f", *options, "-o", "copy", f"{url}/in/large"], 90)
        assert digest(way.directory / "copy") == digest(large), "the copy differs"

    def put(name, *options):
        way.run(["curl", "-sS", "-f", *options, "-T", large, f"{url}/out/{name}"], 90)
        assert digest(root / "out" / name) == digest(large), "the copy differs"

    def names():
        listed = way.run(["curl", "-sS", "-f", "-l", f"{url}/in/"], 30).split()
        assert sorted(listed) == sorted(path.name for path in (root / "in").iterdir()), listed
    way.case("list", names)
    way.case("get-passive", get)
    way.case("get-active", get, "-P", "127.0.0.1")
    way.case("put-passive", put, "passive")
    way.case("put-active", put, "active", "-P", "127.0.0.1")
    way.case("stops", way.stop, server)
    return way.outcomes
