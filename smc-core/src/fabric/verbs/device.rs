//! Which devices, ports and GIDs there are, which of them SMC-R can use, and why not the others.
//!
//! All of it is read from sysfs (Documentation/ABI/stable/sysfs-class-infiniband of the kernel)
//! and by trying the device node, so it works, and explains itself, where the library is missing.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::{MEMLOCK_MIN, Unusable};
use crate::fds;
use crate::sys::Errno;
use crate::wire::Gid;

/// Entries of a GID table that are looked at: `sgid_index` of the verbs has eight bits.
const GID_INDEX_END: u16 = 256;

/// All RDMA devices of the host, as they were at one moment.
#[derive(Clone, Debug)]
pub struct Survey {
    /// Why this process can use none of them, whatever their state.
    pub unusable: Option<Unusable>,
    /// By name.
    pub devices: Vec<Device>,
}

/// One RDMA device.
#[derive(Clone, Debug)]
pub struct Device {
    /// Name, such as `mlx5_0`.
    pub name: String,
    /// Device node through which processes use it.
    pub node: Option<PathBuf>,
    /// Why it can't be used at all.
    pub unusable: Option<Unusable>,
    /// By number.
    pub ports: Vec<Port>,
}

/// One port of a device.
#[derive(Clone, Debug)]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// State's name: ACTIVE, DOWN, INIT, ARMED, …
    pub state: String,
    /// Ethernet or InfiniBand.
    pub link_layer: String,
    /// Why no GID of it can be used.
    pub unusable: Option<Unusable>,
    /// Used entries of its GID table.
    pub gids: Vec<GidEntry>,
}

/// One used entry of a port's GID table.
#[derive(Clone, Debug)]
pub struct GidEntry {
    /// Place in the table: `sgid_index`.
    pub index: u8,
    /// The GID.
    pub gid: Gid,
    /// Type, as sysfs names it: "RoCE v2", "IB/RoCE v1".
    pub kind: String,
    /// Network device with this address.
    pub netdev: Option<String>,
    /// MAC address of that network device.
    pub mac: Option<[u8; 6]>,
    /// Why it can't be used.
    pub unusable: Option<Unusable>,
}

/// Where a connection's queue pair is to live, and what CLC messages say of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Device, by name.
    pub device: String,
    /// Port, from 1.
    pub port: u8,
    /// Place in the port's GID table.
    pub gid_index: u8,
    /// The GID at that place.
    pub gid: Gid,
    /// Network device of the GID.
    pub netdev: String,
    /// MAC address of that network device.
    pub mac: [u8; 6],
}

impl Survey {
    /// Looks at this host. Reads a few hundred small files a port, and tries to open each device, so take
    /// it once, and again after news of a port or GID ([`super::AsyncEvent`]).
    pub fn take() -> Survey {
        // The files get numbers that a thread of the program might be closing.
        fds::make_private(|_| {
            let mut survey = Survey::of(Path::new("/sys"), Path::new("/dev"));
            survey.unusable = survey.unusable.or_else(memory_limit);
            survey
        })
    }

    /// Looks at a host whose sysfs and devices are mounted elsewhere.
    pub fn of(sys: &Path, dev: &Path) -> Survey {
        let class = sys.join("class/infiniband");
        let devices: Vec<Device> = names(&class)
            .into_iter()
            .map(|name| Device::read(sys, dev, &class.join(&name), name))
            .collect();
        Survey {
            unusable: devices.is_empty().then_some(Unusable::NoDevices),
            devices,
        }
    }

    /// Whether there is any GID that can be used.
    pub fn usable(&self) -> bool {
        self.unusable.is_none() && self.first(|_| true).is_some_and(|r| r.is_ok())
    }

    /// Chooses for a connection with this local address, on this network device if it is known: the
    /// RoCEv2 GID that is this address, else the first on the same network device with an address of
    /// the same family.
    pub fn choose(&self, local: IpAddr, netdev: Option<&str>) -> Result<Choice, Unusable> {
        if let Some(why) = &self.unusable {
            return Err(why.clone());
        }
        let local = local.to_canonical();
        let same = |entry: &GidEntry| entry.gid.ip() == local;
        let near = |entry: &GidEntry| {
            entry.netdev.is_some()
                && entry.netdev.as_deref() == netdev
                && entry.gid.ip().is_ipv4() == local.is_ipv4()
                && !entry.gid.is_link_local()
        };
        match self.first(same) {
            Some(Ok(choice)) => Ok(choice),
            found => match self.first(near).or(found) {
                Some(outcome) => outcome,
                None => Err(Unusable::NoGidFor(local)),
            },
        }
    }

    /// At each usable port but that of `first`, the first GID of the same address family.
    pub fn others(&self, first: &Choice) -> Vec<Choice> {
        let wanted = |entry: &GidEntry| {
            entry.gid.ip().is_ipv4() == first.gid.ip().is_ipv4() && !entry.gid.is_link_local()
        };
        let ports = self
            .devices
            .iter()
            .flat_map(|device| device.ports.iter().map(move |port| (device, port)));
        ports
            .filter(|(device, port)| (&device.name, port.number) != (&first.device, first.port))
            .filter_map(|(device, port)| {
                let mut entries = port.gids.iter().filter(|entry| wanted(entry));
                entries.find_map(|entry| choice(device, port, entry).ok())
            })
            .collect()
    }

    /// The first usable of the wanted entries; else why the first of them isn't.
    fn first(&self, wanted: impl Fn(&GidEntry) -> bool) -> Option<Result<Choice, Unusable>> {
        let mut refused = None;
        for device in &self.devices {
            for port in &device.ports {
                for entry in port.gids.iter().filter(|entry| wanted(entry)) {
                    match choice(device, port, entry) {
                        Ok(choice) => return Some(Ok(choice)),
                        Err(why) => refused = refused.or(Some(Err(why))),
                    }
                }
            }
        }
        refused
    }
}

fn choice(device: &Device, port: &Port, entry: &GidEntry) -> Result<Choice, Unusable> {
    let refused = [&device.unusable, &port.unusable, &entry.unusable];
    if let Some(why) = refused.into_iter().flatten().next() {
        return Err(why.clone());
    }
    let (Some(netdev), Some(mac)) = (entry.netdev.clone(), entry.mac) else {
        return Err(Unusable::NoNetdev);
    };
    Ok(Choice {
        device: device.name.clone(),
        port: port.number,
        gid_index: entry.index,
        gid: entry.gid,
        netdev,
        mac,
    })
}

impl Device {
    fn read(sys: &Path, dev: &Path, path: &Path, name: String) -> Device {
        let node = uverbs_of(sys, &name).map(|uverbs| dev.join("infiniband").join(uverbs));
        let mut ports: Vec<Port> = names(&path.join("ports"))
            .iter()
            .filter_map(|number| Some((number.parse().ok()?, number)))
            .map(|(number, dir)| Port::read(sys, &path.join("ports").join(dir), number))
            .collect();
        ports.sort_by_key(|port| port.number);
        // "1: CA" is what InfiniBand and RoCE devices say, "4: RNIC" iWARP.
        let kind = after_colon(&text(&path.join("node_type")));
        let unusable = if kind != "CA" {
            Some(Unusable::NotRoce(kind))
        } else {
            node.as_deref().map_or(Some(Unusable::NoUverbs), try_node)
        };
        Device {
            name,
            node,
            unusable,
            ports,
        }
    }
}

impl Port {
    fn read(sys: &Path, path: &Path, number: u8) -> Port {
        let state = after_colon(&text(&path.join("state")));
        let link_layer = text(&path.join("link_layer"));
        let gids: Vec<GidEntry> = (0..GID_INDEX_END)
            .filter_map(|index| GidEntry::read(sys, path, u8::try_from(index).ok()?))
            .collect();
        let netdev = || gids.iter().find_map(|entry| entry.netdev.clone());
        let unusable = if link_layer != "Ethernet" {
            Some(Unusable::NotEthernet(link_layer.clone()))
        } else if state != "ACTIVE" {
            Some(Unusable::PortDown {
                state: state.clone(),
                netdev: netdev(),
            })
        } else if gids.iter().all(|entry| entry.unusable.is_some()) {
            Some(Unusable::NoRoceV2Gid(netdev()))
        } else {
            None
        };
        Port {
            number,
            state,
            link_layer,
            unusable,
            gids,
        }
    }
}

impl GidEntry {
    fn read(sys: &Path, port: &Path, index: u8) -> Option<GidEntry> {
        let gid = Gid::parse(&text(&port.join(format!("gids/{index}"))))?;
        if gid == Gid::ZERO {
            return None;
        }
        let kind = text(&port.join(format!("gid_attrs/types/{index}")));
        let netdev = Some(text(&port.join(format!("gid_attrs/ndevs/{index}"))))
            .filter(|name| !name.is_empty());
        let mac = netdev
            .as_ref()
            .and_then(|name| parse_mac(&text(&sys.join("class/net").join(name).join("address"))));
        let unusable = if kind != "RoCE v2" {
            Some(Unusable::NotRoceV2(kind.clone()))
        } else if mac.is_none() {
            Some(Unusable::NoNetdev)
        } else {
            None
        };
        Some(GidEntry {
            index,
            gid,
            kind,
            netdev,
            mac,
            unusable,
        })
    }
}

/// Why the device behind `node` can't be opened. Opening it makes nothing and holds nothing once closed.
fn try_node(node: &Path) -> Option<Unusable> {
    let error = fs::File::options()
        .read(true)
        .write(true)
        .open(node)
        .err()?;
    Some(node_refused(node, &error))
}

fn node_refused(node: &Path, error: &io::Error) -> Unusable {
    match error.kind() {
        io::ErrorKind::NotFound => Unusable::NodeMissing(node.into()),
        io::ErrorKind::PermissionDenied => Unusable::NodeForbidden(node.into()),
        _ => {
            let errno = Errno::new(error.raw_os_error().unwrap_or(libc::EIO));
            Unusable::NodeFailed(node.into(), errno)
        }
    }
}

/// The uverbs device of the RDMA device `name`.
fn uverbs_of(sys: &Path, name: &str) -> Option<String> {
    let class = sys.join("class/infiniband_verbs");
    names(&class)
        .into_iter()
        .find(|uverbs| text(&class.join(uverbs).join("ibdev")) == name)
}

/// Whether RLIMIT_MEMLOCK is below [`MEMLOCK_MIN`] and counts for this process (mlock(2)).
fn memory_limit() -> Option<Unusable> {
    const CAP_IPC_LOCK: u32 = 14;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
        .unwrap_or(0);
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: getrlimit writes one rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    too_little(limit.rlim_cur, capabilities & (1 << CAP_IPC_LOCK) != 0)
}

fn too_little(limit: u64, exempt: bool) -> Option<Unusable> {
    (!exempt && limit < MEMLOCK_MIN).then_some(Unusable::MemoryLimit(limit))
}

/// Names in a directory, sorted; none if it can't be read.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// Contents of a sysfs attribute; empty if it has none (unused places of a GID table give an error).
fn text(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

/// "4: ACTIVE" -> "ACTIVE"; "1: CA" -> "CA".
fn after_colon(text: &str) -> String {
    let name = text.split_once(':').map_or(text, |(_, name)| name);
    name.trim().to_owned()
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

#[cfg(test)]
mod tests;
