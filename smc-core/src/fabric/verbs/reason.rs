//! Why RDMA can't be used: for this process, a device, a port, an entry of its GID table or a connection.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::sys::Errno;

/// Bytes that a process must be allowed to lock for one link: a memory region of 4 MiB, the receive
/// buffers, and the queues, which most drivers lock too.
pub const MEMLOCK_MIN: u64 = 6 << 20;

/// A reason, with a sentence (its `Display`) that says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// dlopen failed; its message.
    #[error("libibverbs can't be loaded ({0}); run: apt-get install libibverbs1 ibverbs-providers")]
    LibraryMissing(String),
    /// A function is not in the library.
    #[error("libibverbs is too old: it has no {0}; install rdma-core 36 or later")]
    LibraryTooOld(&'static str),
    /// The kernel doesn't keep pages that a device uses apart at fork.
    #[error(
        "memory that a device uses would be lost when the program forks; use Linux 5.13 or later"
    )]
    ForkUnsafe,
    /// RLIMIT_MEMLOCK is too low; bytes.
    #[error(
        "only {0} bytes of memory may be locked, a link needs {MEMLOCK_MIN}; \
         run: ulimit -l unlimited (services: LimitMEMLOCK=infinity)"
    )]
    MemoryLimit(u64),
    /// There is no RDMA device.
    #[error(
        "there is no RDMA device; load the network card's RDMA driver, or make a software device: \
         modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
    )]
    NoDevices,
    /// An iWARP or other device, by the node type of sysfs.
    #[error("it is not a RoCE device (node type \"{0}\"); SMC-R needs RoCE")]
    NotRoce(String),
    /// The kernel offers the device to no process.
    #[error("it has no uverbs device; run: modprobe ib_uverbs")]
    NoUverbs,
    /// The device node doesn't exist.
    #[error(
        "{node} doesn't exist; run: udevadm trigger \
         (containers: add --device={node} to the run command)",
        node = .0.display()
    )]
    NodeMissing(PathBuf),
    /// The device node may not be opened by this process.
    #[error(
        "no permission to open {node}; run: chmod 666 {node} \
         (containers: add --device={node} to the run command)",
        node = .0.display()
    )]
    NodeForbidden(PathBuf),
    /// The device node can't be opened for another cause.
    #[error("{node} can't be opened: {1}; see dmesg", node = .0.display())]
    NodeFailed(PathBuf, Errno),
    /// libibverbs has no provider for this device.
    #[error("libibverbs has no driver for it; run: apt-get install ibverbs-providers")]
    NoProvider,
    /// An InfiniBand port, by the link layer of sysfs.
    #[error("its link layer is \"{0}\"; SMC-R needs RoCE, that is Ethernet")]
    NotEthernet(String),
    /// The port isn't active: its state, and its network device where known.
    #[error("it is {state}; run: ip link set {} up", netdev.as_deref().unwrap_or("NETDEV"))]
    PortDown {
        /// The state's name, as sysfs has it.
        state: String,
        /// The port's network device.
        netdev: Option<String>,
    },
    /// No entry of the GID table is of type RoCE v2.
    #[error(
        "it has no RoCEv2 address; run: ip address add ADDRESS/PREFIX dev {}",
        .0.as_deref().unwrap_or("NETDEV")
    )]
    NoRoceV2Gid(Option<String>),
    /// The GID is of another type, as sysfs names it.
    #[error("it is of type \"{0}\", not RoCE v2")]
    NotRoceV2(String),
    /// The GID has no network device.
    #[error("its network device is gone")]
    NoNetdev,
    /// No RDMA port has the connection's local address, nor lies on its network device.
    #[error(
        "no RDMA device has the address {0}; see: smctl device, and: rdma link add rxe0 type rxe \
         netdev NETDEV"
    )]
    NoGidFor(IpAddr),
    /// A call failed when the device was to be used.
    #[error("{0}")]
    Failed(#[from] super::Error),
}

impl Unusable {
    /// Stable name for scripts.
    pub fn name(&self) -> &'static str {
        match self {
            Unusable::LibraryMissing(_) => "library-missing",
            Unusable::LibraryTooOld(_) => "library-too-old",
            Unusable::ForkUnsafe => "fork-unsafe",
            Unusable::MemoryLimit(_) => "memory-limit",
            Unusable::NoDevices => "no-devices",
            Unusable::NotRoce(_) => "not-roce",
            Unusable::NoUverbs => "no-uverbs",
            Unusable::NodeMissing(_) => "node-missing",
            Unusable::NodeForbidden(_) => "node-forbidden",
            Unusable::NodeFailed(..) => "node-failed",
            Unusable::NoProvider => "no-provider",
            Unusable::NotEthernet(_) => "not-ethernet",
            Unusable::PortDown { .. } => "port-down",
            Unusable::NoRoceV2Gid(_) => "no-rocev2-gid",
            Unusable::NotRoceV2(_) => "not-rocev2",
            Unusable::NoNetdev => "no-netdev",
            Unusable::NoGidFor(_) => "no-gid-for-address",
            Unusable::Failed(_) => "failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_name_the_command() {
        let down = Unusable::PortDown {
            state: "DOWN".into(),
            netdev: Some("eth0".into()),
        };
        assert_eq!(down.to_string(), "it is DOWN; run: ip link set eth0 up");
        let node = Unusable::NodeForbidden("/dev/infiniband/uverbs0".into());
        assert_eq!(
            node.to_string(),
            "no permission to open /dev/infiniband/uverbs0; run: chmod 666 /dev/infiniband/uverbs0 \
             (containers: add --device=/dev/infiniband/uverbs0 to the run command)"
        );
        let limit = Unusable::MemoryLimit(65536).to_string();
        assert!(limit.contains("ulimit -l unlimited"), "{limit}");
    }
}
