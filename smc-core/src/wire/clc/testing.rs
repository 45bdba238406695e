//! Random messages for the tests of this module and of the negotiation.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::super::{Eid, Gid, Mac, Mtu, Psn, Qpn, RmbSize, Rtoken, SystemId};
use super::*;

/// The bytes of `message`.
pub(crate) fn bytes_of(message: &Message) -> Vec<u8> {
    let mut buf = [0; MAX_EMIT];
    let len = message.emit(&mut buf).unwrap();
    buf[..len].to_vec()
}

fn gid() -> impl Strategy<Value = Gid> {
    any::<[u8; 16]>().prop_map(Gid)
}

fn mac() -> impl Strategy<Value = Mac> {
    any::<[u8; 6]>().prop_map(Mac)
}

fn list<T: Copy + std::fmt::Debug>(
    item: impl Strategy<Value = T>,
) -> impl Strategy<Value = List<T>> {
    vec(item, 0..=8).prop_map(|items| List::from_slice(&items).unwrap())
}

fn prefixes() -> impl Strategy<Value = Prefixes> {
    let ipv6 = (any::<u128>(), any::<u8>()).prop_map(|(addr, len)| Ipv6Prefix {
        addr: addr.into(),
        len,
    });
    (any::<u32>(), any::<u8>(), list(ipv6)).prop_map(|(ipv4, ipv4_len, ipv6)| Prefixes {
        ipv4: ipv4.into(),
        ipv4_len,
        ipv6,
    })
}

pub(crate) fn proposal() -> impl Strategy<Value = Proposal> {
    let v1 =
        (gid(), mac(), prefixes()).prop_map(|(gid, mac, prefixes)| OfferV1 { gid, mac, prefixes });
    let v2 = (
        0u8..16,
        gid(),
        any::<u8>(),
        any::<u8>(),
        any::<u16>(),
        list(any::<[u8; 32]>().prop_map(Eid)),
    )
        .prop_map(
            |(release, gid, max_conns, max_links, features, eids)| OfferV2 {
                release,
                gid,
                max_conns,
                max_links,
                features,
                eids,
            },
        );
    let system_id = any::<[u8; 8]>().prop_map(SystemId);
    (
        any::<bool>(),
        system_id,
        any::<[u8; 8]>(),
        option::of(v1),
        option::of(v2),
    )
        .prop_map(|(two, system_id, vendor, v1, v2)| Proposal {
            version: if two { Version::V2 } else { Version::V1 },
            system_id,
            vendor: if two { vendor } else { [0; 8] },
            v1,
            v2: v2.filter(|_| two),
        })
}

pub(crate) fn conn_end() -> impl Strategy<Value = ConnEnd> {
    (
        (gid(), mac(), any::<[u8; 3]>(), any::<[u8; 3]>()),
        (1u8..=5, 0u8..16, 1u8..),
        (any::<u32>(), any::<u64>(), 1u32..),
    )
        .prop_map(
            |((gid, mac, qpn, psn), (mtu, size, rmb_index), (rkey, addr, alert_token))| ConnEnd {
                gid,
                mac,
                qpn: Qpn::from_be_bytes(qpn),
                psn: Psn::from_be_bytes(psn),
                mtu: Mtu::from_code(mtu).unwrap(),
                rtoken: Rtoken { rkey, addr },
                rmb_size: RmbSize::from_code(size).unwrap(),
                rmb_index,
                alert_token,
            },
        )
}

/// `gids` as only a Confirm has them.
pub(crate) fn accept_confirm(gids: bool) -> impl Strategy<Value = AcceptConfirm> {
    let extension = (
        (any::<bool>(), 0u8..16, 0u8..16, any::<[u8; 32]>()),
        (any::<u8>(), any::<u8>(), any::<u16>(), any::<u32>()),
        list(gid()),
    )
        .prop_map(
            move |((direct, os, release, hostname), (conns, links, features, vendor), list)| {
                let v21 = release > 0;
                FirstContact {
                    direct,
                    os,
                    release,
                    hostname,
                    max_conns: if v21 { conns } else { 0 },
                    max_links: if v21 { links } else { 0 },
                    features: if v21 { features } else { 0 },
                    vendor: if v21 { vendor } else { 0 },
                    gids: if gids { list } else { List::new() },
                }
            },
        );
    let v2 = (any::<[u8; 32]>().prop_map(Eid), option::of(extension));
    (
        any::<[u8; 8]>().prop_map(SystemId),
        any::<bool>(),
        conn_end(),
        option::of(v2),
    )
        .prop_map(|(system_id, first_contact, end, v2)| AcceptConfirm {
            system_id,
            first_contact,
            end,
            v2: v2.map(|(eid, extension)| V2Part {
                eid,
                extension: extension.filter(|_| first_contact),
            }),
        })
}

pub(crate) fn decline() -> impl Strategy<Value = Decline> {
    (
        any::<bool>(),
        any::<bool>(),
        any::<[u8; 8]>().prop_map(SystemId),
        any::<u32>(),
        0u8..16,
    )
        .prop_map(|(two, out_of_sync, system_id, code, os)| Decline {
            version: if two { Version::V2 } else { Version::V1 },
            out_of_sync,
            system_id,
            diagnosis: code.into(),
            os: if two { os } else { 0 },
        })
}

pub(crate) fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        proposal().prop_map(Message::Proposal),
        accept_confirm(false).prop_map(Message::Accept),
        accept_confirm(true).prop_map(Message::Confirm),
        decline().prop_map(Message::Decline),
    ]
}
