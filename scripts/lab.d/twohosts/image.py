"""What the guests boot: a kernel and an initramfs, made on first use and kept in the cache folder.

The kernel is Debian's, unchanged. Its modules are decompressed and stripped of debug data, which saves a second or more
of emulation; so does booting the ELF file inside the bzImage (through the PVH entry).
"""

import contextlib
import fcntl
import hashlib
import lzma
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import time

from .errors import LabError

LAB = pathlib.Path(__file__).resolve().parent.parent

# Loaded at boot, with what they depend on. rxe wants a hash "crc32", which only crc32_generic offers in emulation.
MODULES = ("crc32_generic", "crc32c_generic", "virtio_net", "9pnet_virtio", "9p", "overlay", "smc", "smc_diag", "rdma_rxe",
           "ib_uverbs", "rdma_ucm")
# Loaded by the kernel or by modprobe when something wants them.
MODULES_ON_DEMAND = ("veth", "dummy", "tun", "tls", "sch_netem", "sch_ingress", "cls_matchall", "cls_u32", "act_mirred",
                     "act_gact", "nf_tables", "nft_numgen", "nft_limit", "nft_ct", "nft_reject_inet", "tcp_diag")
# Programs of the host that are needed in the guest before the host's files are mounted.
PROGRAMS = ("ip", "rdma")
QEMU = "qemu-system-x86_64"
# A sign that the Debian packages are installed.
TOOLS = (QEMU, "busybox", "cc", "cpio", "depmod", "modinfo", "setpriv", "strip", "zstd", *PROGRAMS)

# What no run has used for so long is removed from the cache.
KEEP_DAYS = 14


def cache_folder():
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "xsmc-lab"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def cache_lock():
    """Held while something is made in the cache, so that runs that start together make it once."""
    with open(cache_folder() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest(*parts):
    """A short name for these byte strings."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]


def _discard_unused():
    oldest = time.time() - KEEP_DAYS * 86400
    for path in cache_folder().iterdir():
        if path.name == "lock" or path.stat().st_mtime > oldest:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class Image:
    """Kernel and initramfs. `identity` changes when either does."""

    def __init__(self):
        with cache_lock():
            if not all(map(_which, TOOLS)):
                _prepare()
            self._tree = _newest_kernel() or _make_kernel()
            self.kernel = self._tree / "vmlinux"
            inputs = _initramfs_files()
            self.identity = digest(self._tree.name.encode(), *(os.fsencode(name) + path.read_bytes() for name, path in inputs.items()))
            self.initramfs = cache_folder() / f"initramfs-{self.identity}"
            if not self.initramfs.exists():
                _discard_unused()
                _make_initramfs(self.initramfs, self._tree / "modules", inputs)
            os.utime(self.initramfs)
            os.utime(self._tree)


def _tool(*command, data=b"", folder=None):
    """Output of a program that gets `data` as input and has to succeed."""
    done = subprocess.run(command, input=data, cwd=folder, capture_output=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{command[0]} {command[-1]} failed: {os.fsdecode(done.stderr).strip()}")
    return done.stdout


def _prepare(*arguments):
    """Installs packages and, given a folder, unpacks a kernel there. Its messages go to standard error."""
    if subprocess.run([LAB / "prepare", *arguments], stdin=subprocess.DEVNULL, stdout=2, check=False).returncode != 0:
        raise LabError("packages or kernel of the lab are missing (the reason is above)")


def _which(program):
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _kernel_folder(version):
    return f"kernel-{version}.{digest(repr((MODULES, MODULES_ON_DEMAND)).encode())}"


def _newest_kernel():
    known = cache_folder().glob(_kernel_folder("*"))
    return max(known, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], default=None)


def _make_kernel():
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="unpacked.") as scratch:
        scratch = pathlib.Path(scratch)
        _prepare(scratch / "package")
        (image,) = (scratch / "package" / "boot").glob("vmlinuz-*")
        version = image.name.removeprefix("vmlinuz-")
        made = scratch / "kernel"
        _take_modules(scratch / "package", made / "modules", version)
        (made / "vmlinux").write_bytes(_elf_inside(image.read_bytes()))
        final = cache_folder() / _kernel_folder(version)
        os.rename(made, final)
        return final


def _elf_inside(image):
    """The ELF file that a bzImage holds compressed. Fields: boot protocol 2.08, see the kernel's Documentation/arch/x86/boot."""
    setup_sectors = image[0x1f1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start:start + length]
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        # Four bytes with the size follow the compressed data.
        return _tool("zstd", "-d", "-c", "--long=31", data=payload[:-4])
    if payload.startswith(b"\xfd7zXZ"):
        return lzma.LZMADecompressor().decompress(payload)
    raise LabError(f"the kernel image is compressed in an unknown way (it begins with {payload[:4].hex()})")


def _take_modules(package, output, version):
    """Copies the modules named above and what they depend on, decompressed, stripped and indexed."""
    source = package / "lib" / "modules" / version
    paths = {path.name.split(".")[0].replace("-", "_"): path for path in source.rglob("*.ko*")}
    target = output / "lib" / "modules" / version
    target.mkdir(parents=True)
    wanted, taken = list(MODULES + MODULES_ON_DEMAND), set()
    while wanted:
        name = wanted.pop().replace("-", "_")
        if name in taken:
            continue
        taken.add(name)
        if name not in paths:
            raise LabError(f"the kernel {version} has no module {name}")
        depends = os.fsdecode(_tool(_which("modinfo"), "-F", "depends", paths[name])).strip()
        wanted += depends.split(",") if depends else []
        data = paths[name].read_bytes()
        plain = target / f"{name}.ko"
        plain.write_bytes(lzma.decompress(data) if paths[name].suffix == ".xz" else data)
        _tool("strip", "--strip-debug", plain)
    for index in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(source / index, target)
    _tool(_which("depmod"), "-b", output, version)


def _initramfs_files():
    """What else goes into the initramfs: {path there: path here}."""
    files = {"init": LAB / "init", "guestctl.c": LAB / "guestctl.c"}
    files["bin/busybox"] = pathlib.Path(_which("busybox"))
    for name in PROGRAMS:
        program = pathlib.Path(_which(name))
        files[f"lab/bin/{name}"] = program
        for library in re.findall(r"(/\S+) \(0x", os.fsdecode(_tool("ldd", program))):
            files[library.lstrip("/")] = pathlib.Path(library)
    for script in sorted((LAB / "bin").iterdir()):
        files[f"lab/bin/{script.name}"] = script
    return files


def _make_initramfs(output, modules, files):
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="initramfs.") as scratch:
        root = pathlib.Path(scratch, "root")
        shutil.copytree(modules, root)
        for folder in ("proc", "sys", "dev", "sbin", "bin", "lab/bin"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, path in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / name)
        (root / "guestctl.c").unlink()
        # The kernel calls /sbin/modprobe when it wants a module.
        (root / "sbin" / "modprobe").symlink_to("/bin/busybox")
        (root / "lab" / "modules").write_text("\n".join(MODULES) + "\n")
        _tool("cc", "-static", "-Os", "-s", "-o", root / "lab" / "bin" / "guestctl", LAB / "guestctl.c")
        names = "\n".join(sorted(str(path.relative_to(root)) for path in root.rglob("*")))
        packed = _tool("cpio", "--quiet", "-o", "-H", "newc", "--owner=0:0", data=names.encode(), folder=root)
        fresh = pathlib.Path(scratch, "cpio")
        fresh.write_bytes(packed)
        os.rename(fresh, output)
