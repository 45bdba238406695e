//! LLC messages against captured ones, wrong ones and any.

use super::super::cdc;
use super::super::vectors::{self, from_hex};
use super::super::{Gid, Mac, Mtu, Psn, Qpn, Rtoken};
use super::*;
use proptest::prelude::*;

fn encode(message: Message<'_>) -> Vec<u8> {
    let mut out = vec![0xff; MAX];
    let len = message.emit(&mut out).unwrap();
    assert_eq!(len, message.encoded_len());
    out.truncate(len);
    out
}

fn is_llc(bytes: &[u8]) -> bool {
    bytes.len() >= LEN && bytes[0] & 0xf0 == 0x20
}

#[test]
fn captured_messages_survive() {
    let messages: Vec<_> = vectors::all().filter(|(_, bytes)| is_llc(bytes)).collect();
    assert_eq!(messages.len(), 31);
    for (name, bytes) in messages {
        let message = Message::parse(&bytes).unwrap();
        assert_eq!(message.version, Version::V2, "{name}");
        assert_eq!(
            message.is_response(),
            name.contains("resp") || name.ends_with("reject"),
            "{name}"
        );
        assert_eq!(encode(message), bytes, "{name}");
    }
}

fn gid(d: u8) -> Gid {
    Gid::from_ipv4([10, 9, 0, d].into())
}

/// The body of a captured message.
fn captured(name: &str) -> Body<'static> {
    Message::parse(vectors::get(name).leak()).unwrap().body
}

#[test]
fn captured_confirm_link() {
    assert_eq!(
        captured("confirm-link-resp"),
        Body::ConfirmLink(ConfirmLink {
            response: true,
            no_eyecatcher: true,
            mac: Mac([0x52, 0x54, 0, 0, 0, 2]),
            gid: gid(2),
            qpn: Qpn::new(17).unwrap(),
            link: 1,
            uid: 0x101,
            max_links: 2,
            max_conns: 255,
        })
    );
}

#[test]
fn captured_add_link() {
    let Body::AddLink(add) = captured("add-link-asym-req") else {
        panic!("not ADD LINK");
    };
    assert_eq!(add.answer, AddLinkAnswer::Request);
    assert_eq!(add.mac, Mac([0x52, 0x54, 0, 0, 2, 1]));
    assert_eq!(
        (add.gid, add.qpn, add.link),
        (gid(11), Qpn::new(18).unwrap(), 3)
    );
    assert_eq!(
        (add.mtu, add.psn),
        (Some(Mtu::B1024), Psn::new(0x590d4f).unwrap())
    );
    let extension = add.extension.unwrap();
    assert!(extension.direct);
    assert_eq!(extension.target, gid(11));
    assert_eq!(
        extension.entries().collect::<Vec<_>>(),
        [
            RmbEntry {
                known: 0x4d6,
                token: Rtoken {
                    rkey: 0x643,
                    addr: 0xff21_1454_048c_0000
                },
            },
            RmbEntry {
                known: 0x3b2,
                token: Rtoken {
                    rkey: 0x768,
                    addr: 0xff21_1454_039e_0000
                },
            },
        ]
    );
    let Body::AddLink(reject) = captured("add-link-reject") else {
        panic!("not ADD LINK");
    };
    assert_eq!(reject.answer, AddLinkAnswer::Reject { reason: 0 });
    assert_eq!((reject.mtu, reject.extension), (Some(Mtu::B4096), None));
}

#[test]
fn captured_delete_link() {
    assert_eq!(
        captured("delete-link-resp-client"),
        Body::DeleteLink(DeleteLink {
            response: true,
            all: false,
            orderly: true,
            link: 2,
            reason: DeleteReason::UNKNOWN_LINK,
        })
    );
    assert_eq!(
        captured("delete-link-all-client"),
        Body::DeleteLink(DeleteLink {
            response: false,
            all: true,
            orderly: false,
            link: 0,
            reason: DeleteReason::OPERATOR,
        })
    );
}

#[test]
fn captured_rkeys() {
    assert_eq!(
        captured("confirm-rkey-2tok-resp"),
        Body::ConfirmRkey(ConfirmRkey {
            response: true,
            negative: false,
            retry: false,
            token: Rtoken {
                rkey: 0x42c,
                addr: 0xff21_1454_048c_0000
            },
            others: [
                Some(LinkRtoken {
                    link: 1,
                    token: Rtoken {
                        rkey: 0x4d6,
                        addr: 0xff21_1454_048c_0000
                    },
                }),
                None
            ],
        })
    );
    let Body::DeleteRkey(delete) = captured("delete-rkey-req-client") else {
        panic!("not DELETE RKEY");
    };
    assert_eq!(delete.rkeys.as_slice(), [0x4aa]);
    assert!(!delete.response && !delete.negative);
    assert_eq!(
        captured("test-link-resp"),
        Body::TestLink(TestLink {
            response: true,
            data: [0; 16]
        })
    );
}

/// What the same kernel answered to messages that weren't captured.
#[test]
fn answers_of_the_kernel() {
    let zeros = |hex: &str| {
        let mut bytes = from_hex(hex);
        bytes.resize(LEN, 0);
        bytes
    };
    let unknown = zeros("292c00a0 01 01");
    let message = Message::parse(&unknown).unwrap();
    let Body::DeleteRkey(delete) = message.body else {
        panic!("not DELETE RKEY");
    };
    assert!(delete.response && delete.negative);
    assert_eq!(
        (delete.errors, delete.rkeys),
        (1, Rkeys::new(&[0]).unwrap())
    );
    assert_eq!(encode(message), unknown);

    let refused = zeros("252c0080");
    let message = Message::parse(&refused).unwrap();
    let body = Body::RequestAddLink(RequestAddLink {
        response: true,
        gids: &[],
    });
    assert_eq!(message.body, body);
    assert_eq!(encode(message), refused);

    let asked = [
        zeros("252c0000")[..24].to_vec(),
        from_hex("01000000"),
        gid(77).0.to_vec(),
    ]
    .concat();
    let message = Message::parse(&asked).unwrap();
    let body = Body::RequestAddLink(RequestAddLink {
        response: false,
        gids: &[gid(77).0],
    });
    assert_eq!(message.body, body);
    assert_eq!(encode(message), asked);

    let v1 = zeros("072c0080");
    let message = Message::parse(&v1).unwrap();
    assert_eq!(message.version, Version::V1);
    assert_eq!(encode(message), v1);
}

#[test]
fn lengths() {
    let bytes = vectors::get("test-link-req");
    assert_eq!(Message::parse(&[]), Err(Error::Truncated));
    assert_eq!(Message::parse(&bytes[..43]), Err(Error::Truncated));
    // Bytes after the end are ignored.
    let long = [&bytes[..], &[0xff; 200]].concat();
    assert_eq!(Message::parse(&long), Message::parse(&bytes));
    // Less than the layout, and more than there is.
    for length in [[0, 0], [43, 0], [45, 0], [0xff, 0xff]] {
        let mut wrong = bytes.clone();
        wrong[1..3].copy_from_slice(&length);
        assert_eq!(Message::parse(&wrong), Err(Error::Length), "{length:?}");
    }
    let mut huge = bytes.clone();
    huge.resize(2 * MAX, 0);
    huge[1..3].copy_from_slice(&8192u16.to_le_bytes());
    assert!(Message::parse(&huge).is_ok());
    huge[1..3].copy_from_slice(&0x2020u16.to_le_bytes());
    assert_eq!(Message::parse(&huge), Err(Error::Length));
    let mut v1 = bytes.clone();
    v1[..3].copy_from_slice(&[7, 44, 0]);
    assert!(Message::parse(&v1).is_ok());
    v1[1] = 45;
    assert_eq!(Message::parse(&v1), Err(Error::Length));
}

#[test]
fn the_other_byte_order_is_understood() {
    let bytes = vectors::get("add-link-asym-req");
    let mut swapped = bytes.clone();
    swapped.swap(1, 2);
    swapped.swap(70, 71);
    assert_eq!(Message::parse(&swapped), Message::parse(&bytes));
    // Both fields have the same order.
    swapped.swap(70, 71);
    assert_eq!(Message::parse(&swapped), Err(Error::Length));
}

#[test]
fn counts_that_the_bytes_dont_hold() {
    let mut add = vectors::get("add-link-asym-req");
    add[70] = 3;
    assert_eq!(Message::parse(&add), Err(Error::Length));
    let mut confirm = vectors::get("confirm-rkey-req-client");
    confirm[4] = 3;
    assert!(matches!(Message::parse(&confirm), Err(Error::Field(_))));
    for count in [0, 9, 0xff] {
        let mut delete = vectors::get("delete-rkey-req-client");
        delete[4] = count;
        assert!(matches!(Message::parse(&delete), Err(Error::Field(_))));
    }
    let mut request = vec![0; LEN];
    request[..3].copy_from_slice(&[0x25, 44, 0]);
    request[24] = 2;
    assert_eq!(Message::parse(&request), Err(Error::Length));
    request[24] = 1;
    assert!(Message::parse(&request).is_ok());
}

#[test]
fn types_of_one_version_only() {
    for (kind, known) in [
        (0x03, true),
        (0x23, false),
        (0x05, false),
        (0x25, true),
        (0x08, false),
        (0x28, false),
        (0x2a, false),
        (0x00, false),
        (0x20, false),
        (0x31, false),
        (cdc::TYPE, false),
    ] {
        let mut bytes = vec![0; LEN];
        bytes[0] = kind;
        bytes[1] = LEN as u8;
        match Message::parse(&bytes) {
            Ok(_) => assert!(known, "{kind:#x}"),
            Err(error) => assert!(!known && error == Error::Type(kind), "{kind:#x}: {error}"),
        }
    }
}

#[test]
fn buffers_too_short_for_a_message() {
    let bytes = vectors::get("add-link-asym-req");
    let message = Message::parse(&bytes).unwrap();
    assert_eq!(message.emit(&mut [0; 103]), None);
    assert_eq!(message.emit(&mut [0; 104]), Some(104));
    let many = vec![[0; 16]; MAX / 16];
    let Body::AddLink(mut add) = message.body else {
        panic!("not ADD LINK");
    };
    add.extension.as_mut().unwrap().rmbs = &many;
    let body = Body::AddLink(add);
    assert_eq!(Message { body, ..message }.emit(&mut [0; 2 * MAX]), None);
}

fn token() -> impl Strategy<Value = Rtoken> {
    any::<(u32, u64)>().prop_map(|(rkey, addr)| Rtoken { rkey, addr })
}

fn link_token() -> impl Strategy<Value = LinkRtoken> {
    (any::<u8>(), token()).prop_map(|(link, token)| LinkRtoken { link, token })
}

fn qpn() -> impl Strategy<Value = Qpn> {
    any::<[u8; 3]>().prop_map(Qpn::from_be_bytes)
}

fn entry() -> impl Strategy<Value = RmbEntry> {
    (any::<u32>(), token()).prop_map(|(known, token)| RmbEntry { known, token })
}

/// Messages of both versions, each with an ADD LINK or REQUEST ADD LINK of `rmbs` and `gids` at times.
fn message(
    rmbs: &'static [[u8; 16]],
    gids: &'static [[u8; 16]],
) -> impl Strategy<Value = Message<'static>> {
    let confirm_link = (
        any::<(bool, bool, [u8; 6], [u8; 16])>(),
        qpn(),
        any::<(u8, u32, u8, u8)>(),
    )
        .prop_map(
            |((response, no_eyecatcher, mac, gid), qpn, (link, uid, max_links, max_conns))| {
                Body::ConfirmLink(ConfirmLink {
                    response,
                    no_eyecatcher,
                    mac: Mac(mac),
                    gid: Gid(gid),
                    qpn,
                    link,
                    uid,
                    max_links,
                    max_conns,
                })
            },
        );
    let answer = prop_oneof![
        Just(AddLinkAnswer::Request),
        Just(AddLinkAnswer::Accept),
        Just(AddLinkAnswer::Reject { reason: 0 }),
    ];
    let extension = proptest::option::of(any::<(bool, [u8; 16])>());
    let add_link = (
        answer,
        any::<([u8; 6], [u8; 16], u8, [u8; 3])>(),
        qpn(),
        0u8..7,
        extension,
    )
        .prop_map(
            move |(answer, (mac, gid, link, psn), qpn, mtu, extension)| AddLink {
                answer,
                mac: Mac(mac),
                gid: Gid(gid),
                qpn,
                link,
                mtu: Mtu::from_code(mtu),
                psn: Psn::from_be_bytes(psn),
                extension: match answer {
                    AddLinkAnswer::Reject { .. } => None,
                    _ => extension.map(|(direct, target)| AddLinkExtension {
                        direct,
                        target: Gid(target),
                        rmbs,
                    }),
                },
            },
        )
        .boxed();
    let continuation = (any::<(bool, u8, u8)>(), entry(), entry()).prop_map(
        |((response, link, left), first, second)| {
            Body::AddLinkContinuation(AddLinkContinuation {
                response,
                link,
                left,
                rmbs: [first, second],
            })
        },
    );
    let delete_link =
        any::<(bool, bool, bool, u8, u32)>().prop_map(|(response, all, orderly, link, reason)| {
            Body::DeleteLink(DeleteLink {
                response,
                all,
                orderly,
                link,
                reason: DeleteReason(reason),
            })
        });
    let request = any::<bool>()
        .prop_map(move |response| Body::RequestAddLink(RequestAddLink { response, gids }));
    let others = prop_oneof![
        Just([None, None]),
        link_token().prop_map(|one| [Some(one), None]),
        (link_token(), link_token()).prop_map(|(one, two)| [Some(one), Some(two)]),
    ];
    let confirm_rkey = (any::<(bool, bool, bool)>(), token(), others).prop_map(
        |((response, negative, retry), token, others)| {
            Body::ConfirmRkey(ConfirmRkey {
                response,
                negative,
                retry,
                token,
                others,
            })
        },
    );
    let test_link = any::<(bool, [u8; 16])>()
        .prop_map(|(response, data)| Body::TestLink(TestLink { response, data }));
    let delete_rkey = (
        any::<(bool, bool, u8)>(),
        proptest::collection::vec(any::<u32>(), 1..=8),
    )
        .prop_map(|((response, negative, errors), rkeys)| {
            Body::DeleteRkey(DeleteRkey {
                response,
                negative,
                errors,
                rkeys: Rkeys::new(&rkeys).unwrap(),
            })
        });
    let add_link_v1 = (add_link.clone(), 0u8..16).prop_map(|(add, reason)| {
        Body::AddLink(AddLink {
            answer: match add.answer {
                AddLinkAnswer::Reject { .. } => AddLinkAnswer::Reject { reason },
                other => other,
            },
            extension: None,
            ..add
        })
    });
    let common = prop_oneof![
        confirm_link,
        delete_link,
        confirm_rkey,
        test_link,
        delete_rkey
    ]
    .boxed();
    let v1 = prop_oneof![5 => common.clone(), 1 => add_link_v1, 1 => continuation];
    let v2 = prop_oneof![5 => common, 2 => add_link.prop_map(Body::AddLink), 1 => request];
    prop_oneof![
        v1.prop_map(|body| Message {
            version: Version::V1,
            body
        }),
        v2.prop_map(|body| Message {
            version: Version::V2,
            body
        }),
    ]
}

const MANY: &[[u8; 16]] = &[[0xa5; 16]; 300];

proptest! {
    #[test]
    fn round_trip(
        message in (0..=300usize, 0..=255usize)
            .prop_flat_map(|(rmbs, gids)| message(&MANY[..rmbs], &MANY[..gids])),
    ) {
        let bytes = encode(message);
        prop_assert_eq!(Message::parse(&bytes), Ok(message));
    }

    #[test]
    fn entries_survive(entry in entry()) {
        prop_assert_eq!(RmbEntry::from_bytes(entry.to_bytes()), entry);
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        super::super::fuzzing::llc(&bytes);
    }

    /// Bytes that look like a message at their beginning.
    #[test]
    fn almost_messages(number in 0u8..16, v2: bool, rest in proptest::collection::vec(any::<u8>(), 44..300)) {
        let mut bytes = rest;
        let len = bytes.len() as u16;
        bytes[0] = number;
        bytes[1] = LEN as u8;
        if v2 {
            bytes[0] |= 0x20;
            bytes[1..3].copy_from_slice(&len.to_le_bytes());
            if bytes.len() > 72 {
                bytes[70] %= 16;
                bytes[71] = 0;
            }
        }
        super::super::fuzzing::llc(&bytes);
    }
}
