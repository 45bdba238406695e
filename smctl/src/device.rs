//! `smctl device`: RDMA devices, their ports and GIDs; which can be used, and why not the others.

use crate::output;
use crate::table::{Align, Table};
use serde::Serialize;
use smc_core::fabric::verbs::{self, Context, GidEntry, Port, Survey, Unusable};
use smc_core::wire::Mtu;
use std::io::{self, Write};
use std::process::ExitCode;

/// Options of `smctl device`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON: {"problems": [...], "devices": [...]}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    /// Why this user can't use any device.
    problems: Vec<Reason>,
    devices: Vec<DeviceView>,
}

#[derive(Serialize)]
struct DeviceView {
    name: String,
    node: Option<String>,
    unusable: Option<Reason>,
    ports: Vec<PortView>,
}

#[derive(Serialize)]
struct PortView {
    number: u8,
    state: String,
    link_layer: String,
    /// Largest path MTU, bytes; not known unless the device could be opened.
    mtu: Option<u32>,
    unusable: Option<Reason>,
    gids: Vec<GidView>,
}

#[derive(Serialize)]
struct GidView {
    index: u8,
    gid: String,
    #[serde(rename = "type")]
    kind: String,
    netdev: Option<String>,
    mac: Option<String>,
    unusable: Option<Reason>,
}

#[derive(Serialize)]
struct Reason {
    name: &'static str,
    sentence: String,
}

impl From<&Unusable> for Reason {
    fn from(why: &Unusable) -> Reason {
        Reason {
            name: why.name(),
            sentence: why.to_string(),
        }
    }
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    let survey = Survey::take();
    let report = Report::new(&survey, verbs::check_library().err(), mtus);
    let out = &mut io::stdout().lock();
    if args.json {
        output::json(out, &report)?;
    } else {
        report.write(out)?;
    }
    if report.usable() {
        return Ok(ExitCode::SUCCESS);
    }
    for problem in &report.problems {
        eprintln!("smctl: RDMA can't be used: {}", problem.sentence);
    }
    if report.problems.is_empty() {
        eprintln!("smctl: RDMA can't be used: no device is in order");
    }
    Ok(ExitCode::FAILURE)
}

/// Opens a device and asks for the MTU of each of `ports`.
fn mtus(device: &str, ports: &[Port]) -> Result<Vec<Mtu>, Unusable> {
    let context = Context::open(device)?;
    let mtu = |port: &Port| Ok(context.port(port.number)?.mtu);
    ports.iter().map(mtu).collect()
}

impl Report {
    /// `probe` opens a device; it isn't tried where something is known to be wrong.
    fn new(
        survey: &Survey,
        library: Option<Unusable>,
        probe: impl Fn(&str, &[Port]) -> Result<Vec<Mtu>, Unusable>,
    ) -> Report {
        let devices = survey.devices.iter().map(|device| {
            let (mtus, refused) = match (&library, &device.unusable) {
                (None, None) => match probe(&device.name, &device.ports) {
                    Ok(mtus) => (mtus, None),
                    Err(why) => (Vec::new(), Some(Reason::from(&why))),
                },
                (_, unusable) => (Vec::new(), unusable.as_ref().map(Reason::from)),
            };
            let ports = device.ports.iter().enumerate();
            DeviceView {
                name: device.name.clone(),
                node: device.node.as_ref().map(|node| node.display().to_string()),
                unusable: refused,
                ports: ports
                    .map(|(i, port)| PortView::new(port, mtus.get(i)))
                    .collect(),
            }
        });
        Report {
            devices: devices.collect(),
            problems: [&survey.unusable, &library]
                .into_iter()
                .flatten()
                .map(Reason::from)
                .collect(),
        }
    }

    /// Whether a connection could use any GID of any device.
    fn usable(&self) -> bool {
        let in_order = |port: &&PortView| port.unusable.is_none();
        let devices = self.devices.iter().filter(|d| d.unusable.is_none());
        let ports = devices.flat_map(|device| &device.ports).filter(in_order);
        let mut gids = ports.flat_map(|port| &port.gids);
        self.problems.is_empty() && gids.any(|gid| gid.unusable.is_none())
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.devices.is_empty() {
            return Ok(());
        }
        let mut table = Table::new(&[
            ("DEVICE", Align::Left),
            ("PORT", Align::Right),
            ("STATE", Align::Left),
            ("MTU", Align::Right),
            ("INDEX", Align::Right),
            ("GID", Align::Left),
            ("TYPE", Align::Left),
            ("NETDEV", Align::Left),
            ("USABLE", Align::Left),
        ]);
        let mut reasons = Vec::new();
        for device in &self.devices {
            note(&mut reasons, device.name.clone(), &device.unusable);
            if device.ports.is_empty() {
                table.row([device.name.clone()]);
            }
            for port in &device.ports {
                let name = format!("{} port {}", device.name, port.number);
                note(&mut reasons, name.clone(), &port.unusable);
                let usable = device.unusable.is_none() && port.unusable.is_none();
                let start = [
                    device.name.clone(),
                    port.number.to_string(),
                    port.state.clone(),
                    port.mtu.map_or("-".into(), |mtu| mtu.to_string()),
                ];
                if port.gids.is_empty() {
                    table.row(start.clone());
                }
                for gid in &port.gids {
                    note(
                        &mut reasons,
                        format!("{name} GID {}", gid.index),
                        &gid.unusable,
                    );
                    let usable = usable && gid.unusable.is_none() && self.problems.is_empty();
                    table.row(start.clone().into_iter().chain([
                        gid.index.to_string(),
                        gid.gid.clone(),
                        gid.kind.clone(),
                        gid.netdev.clone().unwrap_or_else(|| "-".into()),
                        if usable { "yes" } else { "no" }.into(),
                    ]));
                }
            }
        }
        table.write(out, "")?;
        if !reasons.is_empty() {
            writeln!(out, "\nWhy not:")?;
        }
        for (what, why) in reasons {
            writeln!(out, "  {what}: {why}")?;
        }
        Ok(())
    }
}

fn note<'a>(reasons: &mut Vec<(String, &'a str)>, what: String, why: &'a Option<Reason>) {
    reasons.extend(why.iter().map(|why| (what.clone(), why.sentence.as_str())));
}

impl PortView {
    fn new(port: &Port, mtu: Option<&Mtu>) -> PortView {
        PortView {
            number: port.number,
            state: port.state.clone(),
            link_layer: port.link_layer.clone(),
            mtu: mtu.map(|mtu| mtu.bytes()),
            unusable: port.unusable.as_ref().map(Reason::from),
            gids: port.gids.iter().map(GidView::new).collect(),
        }
    }
}

impl GidView {
    fn new(entry: &GidEntry) -> GidView {
        let mac = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
        GidView {
            index: entry.index,
            gid: entry.gid.to_string(),
            kind: entry.kind.clone(),
            netdev: entry.netdev.clone(),
            mac: entry.mac.map(mac),
            unusable: entry.unusable.as_ref().map(Reason::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_core::fabric::verbs::Device;
    use smc_core::wire::Gid;

    fn survey() -> Survey {
        let entry = |index, gid: &str, unusable| GidEntry {
            index,
            gid: Gid::parse(gid).unwrap(),
            kind: "RoCE v2".into(),
            netdev: Some("eth0".into()),
            mac: Some([0x52, 0x54, 0, 0, 0, 1]),
            unusable,
        };
        Survey {
            unusable: None,
            devices: vec![Device {
                name: "rxe0".into(),
                node: Some("/dev/infiniband/uverbs0".into()),
                unusable: None,
                ports: vec![Port {
                    number: 1,
                    state: "ACTIVE".into(),
                    link_layer: "Ethernet".into(),
                    unusable: None,
                    gids: vec![
                        entry(0, "fe80::1", Some(Unusable::NoNetdev)),
                        entry(1, "::ffff:10.9.0.1", None),
                    ],
                }],
            }],
        }
    }

    fn probe(_: &str, _: &[Port]) -> Result<Vec<Mtu>, Unusable> {
        Ok(vec![Mtu::B4096])
    }

    fn text(report: &Report) -> String {
        let mut out = Vec::new();
        report.write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn shows_what_can_be_used_and_why_not_the_rest() {
        let report = Report::new(&survey(), None, probe);
        assert!(report.usable());
        assert_eq!(
            text(&report),
            "\
DEVICE  PORT  STATE    MTU  INDEX  GID              TYPE     NETDEV  USABLE
rxe0       1  ACTIVE  4096      0  fe80::1          RoCE v2  eth0    no
rxe0       1  ACTIVE  4096      1  ::ffff:10.9.0.1  RoCE v2  eth0    yes

Why not:
  rxe0 port 1 GID 0: its network device is gone
"
        );
        let json = serde_json::to_value(&report).unwrap();
        let gid = &json["devices"][0]["ports"][0]["gids"][1];
        assert_eq!(gid["mac"], "52:54:00:00:00:01");
        assert_eq!(gid["type"], "RoCE v2");
        assert!(gid["unusable"].is_null());
    }

    #[test]
    fn a_device_that_does_not_open_is_not_usable() {
        let report = Report::new(&survey(), None, |_, _| Err(Unusable::NoProvider));
        assert!(!report.usable());
        let text = text(&report);
        assert!(text.contains("rxe0: libibverbs has no driver"), "{text}");
        assert!(!text.contains("yes"), "{text}");
    }

    #[test]
    fn without_the_library_nothing_is_opened() {
        let missing = Some(Unusable::LibraryMissing("not found".into()));
        let report = Report::new(&survey(), missing, |_, _| unreachable!());
        assert!(!report.usable());
        assert!(!text(&report).contains("yes"));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["problems"][0]["name"], "library-missing");
        assert!(json["devices"][0]["ports"][0]["mtu"].is_null());
    }

    #[test]
    fn a_host_without_devices_is_told_how_to_get_one() {
        let survey = Survey {
            unusable: Some(Unusable::NoDevices),
            devices: Vec::new(),
        };
        let report = Report::new(&survey, None, probe);
        assert!(!report.usable());
        assert!(report.problems[0].sentence.contains("rdma link add"));
        assert_eq!(text(&report), "");
    }
}
