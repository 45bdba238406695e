use super::*;

/// A made-up sysfs and /dev.
struct Host(tempfile::TempDir);

const V1: &str = "IB/RoCE v1";
const V2: &str = "RoCE v2";

impl Host {
    fn new() -> Host {
        Host(tempfile::tempdir().unwrap())
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.0.path().join(path)).unwrap();
    }

    /// A device with one active Ethernet port, and the network device of its GIDs.
    fn device(&self, name: &str, number: u8, netdev: &str, gids: &[(&str, &str)]) {
        let uverbs = format!("uverbs{number}");
        self.put(&format!("class/infiniband_verbs/{uverbs}/ibdev"), name);
        self.put(&format!("infiniband/{uverbs}"), "");
        self.put(&format!("class/infiniband/{name}/node_type"), "1: CA\n");
        let port = format!("class/infiniband/{name}/ports/1");
        self.put(&format!("{port}/state"), "4: ACTIVE\n");
        self.put(&format!("{port}/link_layer"), "Ethernet\n");
        for (i, (gid, kind)) in gids.iter().enumerate() {
            self.put(&format!("{port}/gids/{i}"), gid);
            self.put(&format!("{port}/gid_attrs/types/{i}"), kind);
            self.put(&format!("{port}/gid_attrs/ndevs/{i}"), netdev);
        }
        let mac = format!("52:54:00:00:00:{number:02x}\n");
        self.put(&format!("class/net/{netdev}/address"), &mac);
    }

    fn rxe() -> Host {
        let host = Host::new();
        let gids = [
            ("fe80:0000:0000:0000:5054:00ff:fe00:0001\n", V2),
            ("0000:0000:0000:0000:0000:ffff:0a09:0001\n", V2),
            ("0000:0000:0000:0000:0000:0000:0000:0000\n", ""),
            ("fd00:0000:0000:0000:0000:0000:0000:0009\n", V2),
        ];
        host.device("rxe0", 7, "eth0", &gids);
        host
    }

    fn survey(&self) -> Survey {
        Survey::of(self.0.path(), self.0.path())
    }

    fn choose(&self, local: &str, netdev: Option<&str>) -> Result<Choice, Unusable> {
        self.survey().choose(local.parse().unwrap(), netdev)
    }
}

fn refused(outcome: Result<Choice, Unusable>) -> &'static str {
    outcome.unwrap_err().name()
}

#[test]
fn reads_a_usable_device() {
    let survey = Host::rxe().survey();
    assert_eq!(survey.unusable, None);
    let [device] = survey.devices.as_slice() else {
        panic!("{survey:?}")
    };
    assert_eq!((device.name.as_str(), &device.unusable), ("rxe0", &None));
    let [port] = device.ports.as_slice() else {
        panic!("{device:?}")
    };
    assert_eq!((port.number, port.state.as_str()), (1, "ACTIVE"));
    assert_eq!(port.unusable, None);
    let indexes: Vec<u8> = port.gids.iter().map(|entry| entry.index).collect();
    assert_eq!(indexes, [0, 1, 3], "the unused place is left out");
}

#[test]
fn chooses_by_address() {
    let host = Host::rxe();
    let choice = host.choose("10.9.0.1", None).unwrap();
    assert_eq!(choice.device, "rxe0");
    assert_eq!((choice.port, choice.gid_index), (1, 1));
    assert_eq!(choice.gid, Gid::from("10.9.0.1".parse::<IpAddr>().unwrap()));
    assert_eq!(choice.netdev, "eth0");
    assert_eq!(choice.mac, [0x52, 0x54, 0, 0, 0, 7]);
    assert_eq!(host.choose("::ffff:10.9.0.1", None).unwrap(), choice);
    assert_eq!(host.choose("fd00::9", None).unwrap().gid_index, 3);
    assert_eq!(refused(host.choose("10.9.0.2", None)), "no-gid-for-address");
}

#[test]
fn chooses_by_network_device_when_the_address_has_no_gid() {
    let host = Host::rxe();
    assert_eq!(host.choose("10.9.0.2", Some("eth0")).unwrap().gid_index, 1);
    assert_eq!(host.choose("fd00::8", Some("eth0")).unwrap().gid_index, 3);
    assert_eq!(
        refused(host.choose("10.9.0.2", Some("eth1"))),
        "no-gid-for-address"
    );
}

#[test]
fn takes_the_roce_v2_entry_of_an_address_that_has_both() {
    let host = Host::new();
    let gid = "0000:0000:0000:0000:0000:ffff:0a09:0001";
    host.device("mlx5_0", 0, "ens1", &[(gid, V1), (gid, V2)]);
    assert_eq!(host.choose("10.9.0.1", None).unwrap().gid_index, 1);
    host.put("class/infiniband/mlx5_0/ports/1/gid_attrs/types/1", V1);
    let survey = host.survey();
    let port = &survey.devices[0].ports[0];
    let netdev = Some("ens1".to_owned());
    assert_eq!(port.unusable, Some(Unusable::NoRoceV2Gid(netdev)));
    assert_eq!(refused(host.choose("10.9.0.1", None)), "no-rocev2-gid");
}

#[test]
fn takes_the_device_that_works_of_two_with_the_address() {
    let host = Host::rxe();
    let gid = "0000:0000:0000:0000:0000:ffff:0a09:0001";
    host.device("aaa0", 8, "eth1", &[(gid, V2)]);
    assert_eq!(host.choose("10.9.0.1", None).unwrap().device, "aaa0");
    host.put("class/infiniband/aaa0/ports/1/state", "1: DOWN");
    assert_eq!(host.choose("10.9.0.1", None).unwrap().device, "rxe0");
}

#[test]
fn says_why_a_port_is_not_usable() {
    let host = Host::rxe();
    host.put("class/infiniband/rxe0/ports/1/state", "1: DOWN\n");
    let why = host.choose("10.9.0.1", None).unwrap_err();
    assert_eq!(why.to_string(), "it is DOWN; run: ip link set eth0 up");
    host.put("class/infiniband/rxe0/ports/1/link_layer", "InfiniBand");
    assert_eq!(refused(host.choose("10.9.0.1", None)), "not-ethernet");
}

#[test]
fn says_why_a_device_is_not_usable() {
    let host = Host::rxe();
    host.remove("infiniband/uverbs7");
    let why = host.choose("10.9.0.1", None).unwrap_err();
    let node = host.0.path().join("infiniband/uverbs7");
    assert_eq!(why, Unusable::NodeMissing(node));
    host.remove("class/infiniband_verbs/uverbs7/ibdev");
    assert_eq!(refused(host.choose("10.9.0.1", None)), "no-uverbs");
    host.put("class/infiniband/rxe0/node_type", "4: RNIC");
    assert_eq!(refused(host.choose("10.9.0.1", None)), "not-roce");
}

#[test]
fn says_why_a_node_does_not_open() {
    let node = Path::new("/dev/infiniband/uverbs0");
    let name = |errno| node_refused(node, &io::Error::from_raw_os_error(errno)).name();
    assert_eq!(name(libc::EACCES), "node-forbidden");
    // What the device controller of a container's cgroup says.
    assert_eq!(name(libc::EPERM), "node-forbidden");
    assert_eq!(name(libc::ENOENT), "node-missing");
    assert_eq!(name(libc::ENXIO), "node-failed");
}

#[test]
fn a_gid_without_network_device_is_not_usable() {
    let host = Host::rxe();
    host.put("class/infiniband/rxe0/ports/1/gid_attrs/ndevs/1", "");
    assert_eq!(refused(host.choose("10.9.0.1", None)), "no-netdev");
}

#[test]
fn a_host_without_devices_says_so() {
    let host = Host::new();
    assert_eq!(refused(host.choose("10.9.0.1", None)), "no-devices");
}

#[test]
fn memory_limit_counts_without_capability_only() {
    assert_eq!(too_little(65536, false), Some(Unusable::MemoryLimit(65536)));
    assert_eq!(too_little(65536, true), None);
    assert_eq!(too_little(MEMLOCK_MIN, false), None);
}

#[test]
fn macs() {
    let mac = [0x52, 0x54, 0, 0, 0, 0xff];
    assert_eq!(parse_mac("52:54:00:00:00:ff"), Some(mac));
    for bad in [
        "",
        "52:54:00:00:00",
        "52:54:00:00:00:ff:00",
        "zz:54:00:00:00:ff",
    ] {
        assert_eq!(parse_mac(bad), None, "{bad}");
    }
}
