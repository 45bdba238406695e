//! The captured messages, odd messages that Linux was seen to take or refuse, and random ones.

use core::net::Ipv4Addr;

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::vectors::{self, get as vector};
use super::super::{Eid, Gid, Mac, Mtu, Psn, Qpn, RmbSize, Rtoken};
use super::testing::{bytes_of, message};
use super::*;

/// Decodes the captured message `name`, after showing that it encodes to the same bytes.
fn captured(name: &str) -> Message {
    let bytes = vector(name);
    assert_eq!(missing(&bytes), Ok(0), "{name}");
    let message = Message::parse(&bytes).unwrap();
    assert_eq!(bytes_of(&message), bytes, "{name}");
    message
}

fn gid(last: u8) -> Gid {
    Gid::from_ipv4(Ipv4Addr::new(10, 9, 0, last))
}

fn padded(name: &str) -> [u8; 32] {
    let mut bytes = [b' '; 32];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

fn eid(name: &str) -> Eid {
    Eid::new(name).unwrap()
}

fn proposal(eids: &[Eid]) -> Message {
    Message::Proposal(Proposal {
        version: Version::V2,
        system_id: SystemId::default(),
        vendor: [0; 8],
        v1: None,
        v2: Some(OfferV2 {
            release: 1,
            gid: gid(2),
            max_conns: 255,
            max_links: 2,
            features: 1,
            eids: List::from_slice(eids).unwrap(),
        }),
    })
}

/// A first contact with the values that all captured ones have, except for those given.
fn first_contact(system_id: u64, end: ConnEnd, gids: &[Gid]) -> AcceptConfirm {
    AcceptConfirm {
        system_id: SystemId(system_id.to_be_bytes()),
        first_contact: true,
        end,
        v2: Some(V2Part {
            eid: eid("XSMC-TEST"),
            extension: Some(FirstContact {
                direct: true,
                os: OS_LINUX,
                release: 1,
                hostname: padded("(none)"),
                max_conns: 255,
                max_links: 2,
                features: 1,
                vendor: 0,
                gids: List::from_slice(gids).unwrap(),
            }),
        }),
    }
}

fn subsequent(system_id: u64, end: ConnEnd) -> AcceptConfirm {
    AcceptConfirm {
        system_id: SystemId(system_id.to_be_bytes()),
        first_contact: false,
        end,
        v2: Some(V2Part {
            eid: eid("XSMC-TEST"),
            extension: None,
        }),
    }
}

/// An end with queue pair 17 and a 64 KiB RMB, as all captured ones have.
fn end(ip: u8, mac: [u8; 6], rtoken: (u32, u64), token: u32, psn: u32, mtu: Mtu) -> ConnEnd {
    ConnEnd {
        gid: gid(ip),
        mac: Mac(mac),
        qpn: Qpn::new(17).unwrap(),
        psn: Psn::new(psn).unwrap(),
        mtu,
        rtoken: Rtoken {
            rkey: rtoken.0,
            addr: rtoken.1,
        },
        rmb_size: RmbSize::from_bytes(64 << 10).unwrap(),
        rmb_index: 1,
        alert_token: token,
    }
}

#[test]
fn every_captured_clc_message_round_trips() {
    let mut seen = 0;
    for (name, bytes) in vectors::all() {
        if bytes.starts_with(&SMCR) {
            captured(name);
            seen += 1;
        }
    }
    assert_eq!(seen, 13);
}

#[test]
fn captured_proposals() {
    let one = proposal(&[eid("XSMC-TEST")]);
    assert_eq!(captured("proposal-1eid"), one);
    assert_eq!(captured("proposal-again"), one);
    assert_eq!(
        captured("proposal-2eid"),
        proposal(&[eid("XSMC-TEST"), eid("A.SECOND-EID")])
    );
}

#[test]
fn captured_first_contact() {
    let mac = [0x52, 0x54, 0, 0, 0, 1];
    let server = end(
        1,
        mac,
        (0x35b, 0xff49_b0f4_038d_0000),
        1,
        0x57_c5f7,
        Mtu::B4096,
    );
    assert_eq!(
        captured("accept-first"),
        Message::Accept(first_contact(0x6d20_5254_0000_0001, server, &[]))
    );
    let mac = [0x52, 0x54, 0, 0, 0, 2];
    let client = end(
        2,
        mac,
        (0x369, 0xff2e_c9f8_437c_0000),
        1,
        0x08_211c,
        Mtu::B4096,
    );
    assert_eq!(
        captured("confirm-first-1gid"),
        Message::Confirm(first_contact(0x995f_5254_0000_0002, client, &[gid(2)]))
    );
}

#[test]
fn captured_first_contact_with_two_ports() {
    let mac = [0x52, 0x54, 0, 0, 1, 1];
    let server = end(
        1,
        mac,
        (0x3b2, 0xff21_1454_039e_0000),
        1,
        0xee_72c8,
        Mtu::B1024,
    );
    assert_eq!(
        captured("accept-first-mtu3"),
        Message::Accept(first_contact(0xa5d7_5254_0000_0101, server, &[]))
    );
    let mac = [0x52, 0x54, 0, 0, 1, 2];
    let client = end(
        2,
        mac,
        (0x305, 0xff1e_a257_03a6_0000),
        1,
        0xef_0f66,
        Mtu::B1024,
    );
    assert_eq!(
        captured("confirm-first-2gid"),
        Message::Confirm(first_contact(
            0xb658_5254_0000_0102,
            client,
            &[gid(2), gid(12)]
        ))
    );
}

#[test]
fn captured_subsequent_contact() {
    let mac = [0x52, 0x54, 0, 0, 0, 1];
    let server = end(
        1,
        mac,
        (0x6c0, 0xff49_b0f4_0393_0000),
        2,
        0x57_c5f7,
        Mtu::B4096,
    );
    assert_eq!(
        captured("accept-subsequent"),
        Message::Accept(subsequent(0x6d20_5254_0000_0001, server))
    );
    let mac = [0x52, 0x54, 0, 0, 0, 2];
    let client = end(
        2,
        mac,
        (0x4aa, 0xff2e_c9f8_437e_0000),
        2,
        0x08_211c,
        Mtu::B4096,
    );
    assert_eq!(
        captured("confirm-subsequent"),
        Message::Confirm(subsequent(0x995f_5254_0000_0002, client))
    );
}

#[test]
fn captured_subsequent_contact_on_the_second_link() {
    let mac = [0x52, 0x54, 0, 0, 2, 1];
    let mut server = end(
        11,
        mac,
        (0x42c, 0xff21_1454_048c_0000),
        2,
        0x36_2bf8,
        Mtu::B1024,
    );
    assert_eq!(
        captured("accept-link2"),
        Message::Accept(subsequent(0xa5d7_5254_0000_0101, server))
    );
    let mac = [0x52, 0x54, 0, 0, 2, 2];
    server = end(
        12,
        mac,
        (0x4e4, 0xff1e_a257_041e_0000),
        2,
        0xf6_333b,
        Mtu::B1024,
    );
    assert_eq!(
        captured("confirm-link2"),
        Message::Confirm(subsequent(0xb658_5254_0000_0102, server))
    );
}

#[test]
fn captured_declines() {
    assert_eq!(
        captured("decline-v2-no-common-ueid"),
        Message::Decline(Decline {
            version: Version::V2,
            out_of_sync: false,
            system_id: SystemId(0x6d20_5254_0000_0001u64.to_be_bytes()),
            diagnosis: Diagnosis::NoSmcDev,
            os: OS_LINUX,
        })
    );
    assert_eq!(
        captured("decline-v1-client"),
        Message::Decline(Decline {
            version: Version::V1,
            out_of_sync: false,
            system_id: SystemId(0x995f_5254_0000_0002u64.to_be_bytes()),
            diagnosis: Diagnosis::NoSmcDev,
            os: 0,
        })
    );
}

/// `name`, changed by `edit`.
fn edited(name: &str, edit: impl FnOnce(&mut Vec<u8>)) -> Result<Message, Error> {
    let mut bytes = vector(name);
    edit(&mut bytes);
    let length = u16::try_from(bytes.len()).unwrap();
    bytes[5..7].copy_from_slice(&length.to_be_bytes());
    Message::parse(&bytes)
}

#[test]
fn tolerates_in_a_proposal_what_linux_does() {
    let good = Message::parse(&vector("proposal-1eid")).unwrap();
    let smcd_eyecatchers = edited("proposal-1eid", |m| {
        let trailer = m.len() - 4;
        m[..4].copy_from_slice(&SMCD);
        m[trailer..].copy_from_slice(&SMCD);
    });
    assert_eq!(smcd_eyecatchers, Ok(good));
    let reserved = edited("proposal-1eid", |m| {
        m[60..80].fill(0xff);
        m[82] = 0xff;
        m[84..86].fill(0xff);
        m[108..120].fill(0xff);
    });
    assert_eq!(reserved, Ok(good));
    assert_eq!(edited("proposal-1eid", |m| m[7] = 0x32), Ok(good));
}

#[test]
fn refuses_in_a_proposal_what_linux_does() {
    let refused = |edit: fn(&mut Vec<u8>)| edited("proposal-1eid", edit).unwrap_err();
    let one_short = refused(|m| {
        m.remove(140);
    });
    assert_eq!(one_short, Error::Truncated);
    assert_eq!(refused(|m| m.insert(140, 0)), Error::Length);
    assert_eq!(refused(|m| *m.last_mut().unwrap() = 0), Error::Trailer);
    assert_eq!(refused(|m| m[51] = 0), Error::Length);
    assert_eq!(refused(|m| m[51] = 0x1d), Error::Length);
    assert_eq!(refused(|m| m[50] = 0xff), Error::Length);
    let nine_eids = refused(|m| {
        m[80] = 9;
        let eid = m[120..152].to_vec();
        for _ in 0..8 {
            m.splice(152..152, eid.iter().copied());
        }
    });
    assert_eq!(nine_eids, Error::Length);
    assert_eq!(refused(|m| m[7] = 0x02), Error::Version(0));
    assert_eq!(refused(|m| m[4] = 5), Error::Type(5));
    assert_eq!(refused(|m| m[0] = b'G'), Error::Eyecatcher);
    let mut wrong_length = vector("proposal-1eid");
    wrong_length[6] -= 1;
    assert_eq!(Message::parse(&wrong_length), Err(Error::Length));
}

/// A Proposal that also offers SMC-D, by both versions, and SMC-R version 1.
#[test]
fn passes_over_smcd() {
    let mut expected = match Message::parse(&vector("proposal-1eid")).unwrap() {
        Message::Proposal(proposal) => proposal,
        other => panic!("{other:?}"),
    };
    expected.v1 = Some(OfferV1 {
        prefixes: Prefixes {
            ipv4: Ipv4Addr::new(10, 9, 0, 0),
            ipv4_len: 24,
            ipv6: List::from_slice(&[Ipv6Prefix {
                addr: "fd00::".parse().unwrap(),
                len: 64,
            }])
            .unwrap(),
        },
        ..Default::default()
    });
    let mut bytes = bytes_of(&Message::Proposal(expected));
    assert_eq!(bytes[7], 0x20);
    assert_eq!(bytes[39], 0x28);
    // 36 + 17 n, as Linux counts.
    assert_eq!(bytes[51], 53);
    let v2 = 80 + 8 + 17;
    bytes[7] = 0x2f;
    bytes[40..50].fill(0x44);
    bytes[v2 + 1] = 2;
    bytes[v2 + 3] |= 1;
    bytes[v2 + 7] = 32 + 32;
    let smcd = bytes.len() - 4;
    bytes.splice(smcd..smcd, [0x55; 48 + 2 * 10]);
    let length = u16::try_from(bytes.len()).unwrap();
    bytes[5..7].copy_from_slice(&length.to_be_bytes());
    assert_eq!(Message::parse(&bytes), Ok(Message::Proposal(expected)));
    // SMC-D only.
    bytes[7] = 0x25;
    let only = Proposal {
        v1: None,
        v2: None,
        ..expected
    };
    assert_eq!(Message::parse(&bytes), Ok(Message::Proposal(only)));
}

/// Before version 2, the prefix area could follow the offset field at once.
#[test]
fn takes_a_short_version_1_proposal() {
    let mut bytes = vec![0xe2, 0xd4, 0xc3, 0xd9, 1, 0, 52, 0x10];
    bytes.extend(1..=8);
    bytes.extend([0xfe; 16]);
    bytes.extend([0x52; 6]);
    bytes.extend([0, 0, 192, 0, 2, 0, 24, 0, 0, 0]);
    bytes.extend(SMCR);
    let expected = Proposal {
        version: Version::V1,
        system_id: SystemId([1, 2, 3, 4, 5, 6, 7, 8]),
        vendor: [0; 8],
        v1: Some(OfferV1 {
            gid: Gid([0xfe; 16]),
            mac: Mac([0x52; 6]),
            prefixes: Prefixes {
                ipv4: Ipv4Addr::new(192, 0, 2, 0),
                ipv4_len: 24,
                ipv6: List::new(),
            },
        }),
        v2: None,
    };
    assert_eq!(Message::parse(&bytes), Ok(Message::Proposal(expected)));
    let long = bytes_of(&Message::Proposal(expected));
    assert_eq!((long.len(), long[7]), (92, 0x18));
}

fn accept(bytes: &[u8]) -> AcceptConfirm {
    match Message::parse(bytes) {
        Ok(Message::Accept(message) | Message::Confirm(message)) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn odd_accepts() {
    let good = Message::parse(&vector("accept-first"));
    let longer = edited("accept-first", |m| {
        m.splice(156..156, [7; 8]);
    });
    assert_eq!(longer, good);
    let wrong = |edit: fn(&mut Vec<u8>)| edited("accept-first", edit).unwrap_err();
    assert_eq!(wrong(|m| *m.last_mut().unwrap() = 0), Error::Trailer);
    assert_eq!(wrong(|m| drop(m.drain(100..153))), Error::Length);
    assert_eq!(wrong(|m| m[7] = 0x18), Error::Length);
    assert_eq!(wrong(|m| m[7] = 0x38), Error::Version(3));
    assert_eq!(wrong(|m| m[7] = 0x2a), Error::Version(0x0a));
    assert_eq!(wrong(|m| m[45] = 0), Error::Field("RMBE index"));
    assert_eq!(wrong(|m| m[49] = 0), Error::Field("alert token"));
    assert_eq!(wrong(|m| m[50] = 0x20), Error::Field("QP MTU"));
    assert_eq!(wrong(|m| m[50] = 0x26), Error::Field("QP MTU"));
    assert_eq!(
        edited("accept-first", |m| m[7] = 0x29),
        Ok(Message::SmcD(Type::Accept))
    );
    // The flag of a first contact without what belongs to it.
    let cut = edited("accept-first", |m| drop(m.drain(104..156)));
    let Ok(Message::Accept(cut)) = cut else {
        panic!("{cut:?}");
    };
    assert!(cut.first_contact);
    assert_eq!(cut.v2.unwrap().extension, None);
}

#[test]
fn version_1_accept() {
    let mut message = accept(&vector("accept-first"));
    message.v2 = None;
    let bytes = bytes_of(&Message::Accept(message));
    assert_eq!((bytes.len(), bytes[7]), (68, 0x18));
    assert_eq!(accept(&bytes), message);
    message.first_contact = false;
    assert_eq!(bytes_of(&Message::Confirm(message))[7], 0x10);
}

/// Release 0 comes with the extension of v2.1, zeros in its last 16 bytes, or without these.
#[test]
fn both_forms_of_release_0() {
    for name in ["accept-first", "confirm-first-1gid", "confirm-first-2gid"] {
        let mut long = vector(name);
        long[105] = 0x20;
        long[140..156].fill(0);
        let message = accept(&long);
        let gids = accept(&vector(name)).v2.unwrap().extension.unwrap().gids;
        let extension = message.v2.unwrap().extension.unwrap();
        assert_eq!((extension.release, extension.max_conns), (0, 0));
        assert_eq!(extension.gids, gids);
        let mut short = long.clone();
        short.drain(140..156);
        let length = u16::try_from(short.len()).unwrap();
        short[5..7].copy_from_slice(&length.to_be_bytes());
        assert_eq!(accept(&short), message, "{name}");
    }
}

#[test]
fn a_confirm_lists_at_most_eight_gids() {
    let mut bytes = vector("confirm-first-1gid");
    bytes[156] = 2;
    assert_eq!(Message::parse(&bytes), Err(Error::Truncated));
    let nine = edited("confirm-first-1gid", |m| {
        m[156] = 9;
        m.splice(160..160, [0; 128]);
    });
    assert_eq!(nine, Err(Error::Length));
}

#[test]
fn odd_declines() {
    let good = Message::parse(&vector("decline-v2-no-common-ueid")).unwrap();
    let odd = |edit: fn(&mut Vec<u8>)| edited("decline-v2-no-common-ueid", edit);
    assert_eq!(odd(|m| m[40..].fill(0)), Ok(good));
    assert_eq!(odd(|m| m[7] = 0x21), Ok(good));
    assert_eq!(odd(|m| m[7] = 0x22), Err(Error::Version(2)));
    assert_eq!(odd(|m| m[7] = 0x10), Err(Error::Length));
    assert_eq!(odd(|m| m.push(0)), Err(Error::Length));
    let unknown = odd(|m| m[16..20].fill(0xff)).unwrap();
    let Message::Decline(decline) = unknown else {
        panic!("{unknown:?}");
    };
    assert_eq!(decline.diagnosis, Diagnosis::Unknown(0xffff_ffff));
    let synced = edited("decline-v2-no-common-ueid", |m| m[7] = 0x28).unwrap();
    assert!(matches!(synced, Message::Decline(d) if d.out_of_sync));
    assert_eq!(bytes_of(&synced)[7], 0x28);
}

#[test]
fn elements_of_an_rmb_stay_in_the_address_space() {
    let mut end = accept(&vector("accept-first")).end;
    assert_eq!(end.rmb_addr(), Some(end.rtoken.addr));
    end.rmb_index = 3;
    assert_eq!(end.rmb_addr(), Some(end.rtoken.addr + (128 << 10)));
    end.rtoken.addr = u64::MAX - (192 << 10);
    assert!(end.rmb_addr().is_some());
    end.rtoken.addr += 1;
    assert_eq!(end.rmb_addr(), None);
}

#[test]
fn says_early_that_a_stream_is_not_clc() {
    assert_eq!(missing(b""), Ok(8));
    assert_eq!(missing(b"G"), Err(Error::Eyecatcher));
    assert_eq!(missing(&[0xe2, 0xd4, 0xc3]), Ok(5));
    assert_eq!(missing(&[0xe2, 0xd4, 0xc3, 0xc4]), Ok(4));
    assert_eq!(missing(&[0xe2, 0xd4, 0xc3, 0xc5]), Err(Error::Eyecatcher));
    let header = [0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10];
    assert_eq!(missing(&header), Ok(20));
    let header = [0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 11, 0x10];
    assert_eq!(missing(&header), Err(Error::Length));
    let header = [0xe2, 0xd4, 0xc3, 0xd9, 1, 0xff, 0xff, 0x22];
    assert_eq!(missing(&header), Ok(65527));
    // Bytes after the message are none of its business.
    let mut bytes = vector("decline-v1-client");
    bytes.extend(b"payload");
    assert_eq!(missing(&bytes), Ok(0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn what_is_emitted_parses_to_the_same(message in message()) {
        let bytes = bytes_of(&message);
        prop_assert_eq!(missing(&bytes), Ok(0));
        prop_assert_eq!(Message::parse(&bytes), Ok(message));
        let mut short = vec![0; bytes.len() - 1];
        prop_assert_eq!(message.emit(&mut short), None);
    }

    #[test]
    fn any_bytes(data in vec(any::<u8>(), 0..700)) {
        fuzzing::clc(&data);
    }

    /// Random bytes hardly ever have a good header and trailer, so give them these.
    #[test]
    fn any_body(kind in 1u8..=4, byte in any::<u8>(), body in vec(any::<u8>(), 0..700)) {
        let mut data = SMCR.to_vec();
        data.push(kind);
        data.extend(u16::try_from(body.len() + 12).unwrap().to_be_bytes());
        data.push(byte);
        data.extend(body);
        data.extend(SMCR);
        fuzzing::clc(&data);
    }

    /// A good message with a few wrong bytes.
    #[test]
    fn nearly_good_messages(
        message in message(),
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut data = bytes_of(&message);
        for (at, byte) in edits {
            let at = at.index(data.len());
            data[at] = byte;
        }
        fuzzing::clc(&data);
    }
}
