use std::net::SocketAddr;

use proptest::prelude::*;

use super::*;

fn rmb() -> impl Strategy<Value = RmbToken> {
    (any::<u32>(), 14u32..=22, any::<u32>()).prop_map(|(chunk, exponent, offset)| {
        let size = 1u32 << exponent;
        let places = (CHUNK_MAX - size) / PAGE + 1;
        RmbToken {
            chunk,
            offset: offset % places * PAGE,
            size,
        }
    })
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    (
        any::<u64>(),
        any::<[u8; 16]>(),
        any::<[u8; 16]>(),
        1u16..,
        1u16..,
    )
        .prop_map(|(netns, local, peer, local_port, peer_port)| Endpoint {
            netns,
            local,
            peer,
            local_port,
            peer_port,
        })
}

fn greeting() -> impl Strategy<Value = Greeting> {
    (any::<u16>(), 1..=i32::MAX as u32, 1u64.., any::<[u8; 16]>()).prop_map(
        |(link_index, pid, node, program)| Greeting {
            version: VERSION,
            link_index,
            pid,
            node: NodeId::from_raw(node).expect("not 0"),
            program,
        },
    )
}

fn message() -> impl Strategy<Value = Message> {
    let slot = any::<(u32, u32, u8)>();
    prop_oneof![
        (greeting(), any::<bool>())
            .prop_map(|(greeting, control)| Message::Hello { greeting, control }),
        greeting().prop_map(|greeting| Message::HelloAck { greeting }),
        any::<u16>().prop_map(|index| Message::Bell { index }),
        (any::<u32>(), RMB_MIN / PAGE..=CHUNK_MAX / PAGE).prop_map(|(index, pages)| {
            Message::Chunk {
                index,
                len: pages * PAGE,
            }
        }),
        (any::<[u32; 4]>(), endpoint(), rmb()).prop_map(|(n, endpoint, rmb)| Message::Open {
            slot: n[0],
            endpoint,
            acceptor_slot: n[1],
            acceptor_gen: n[2],
            opener_sock: n[3],
            rmb,
        }),
        (any::<u32>(), rmb()).prop_map(|(slot, rmb)| Message::Accept { slot, rmb }),
        any::<(u32, u8)>().prop_map(|(slot, reason)| Message::Decline { slot, reason }),
        slot.prop_map(|(slot, generation, pin)| Message::Downgrade {
            slot,
            generation,
            pin
        }),
        any::<(u32, u32, u64)>().prop_map(|(slot, generation, at)| Message::Recall {
            slot,
            generation,
            at
        }),
        slot.prop_map(|(slot, generation, what)| Message::Nack {
            slot,
            generation,
            what
        }),
        slot.prop_map(|(slot, generation, what)| Message::Done {
            slot,
            generation,
            what
        }),
        any::<u32>().prop_map(|seq| Message::Ping { seq }),
        any::<u32>().prop_map(|seq| Message::Pong { seq }),
        (endpoint(), any::<u8>())
            .prop_map(|(endpoint, reason)| Message::PinEnd { endpoint, reason }),
        any::<u32>().prop_map(|slot| Message::Left { slot }),
    ]
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut out = [0xaa; MAX];
    let len = message.encode(&mut out);
    out[..len].to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn round_trip(message in message()) {
        let bytes = encoded(&message);
        prop_assert!(bytes.len() <= MAX);
        prop_assert_eq!(Message::decode(&bytes), Ok(message));
    }

    #[test]
    fn no_other_length_decodes(message in message(), cut in 0usize..128, more in 1usize..9) {
        let bytes = encoded(&message);
        let short = &bytes[..cut.min(bytes.len() - 1)];
        prop_assert_eq!(Message::decode(short), Err(DecodeError::Length));
        let mut long = bytes.clone();
        long.resize(bytes.len() + more, 0);
        prop_assert_eq!(Message::decode(&long), Err(DecodeError::Length));
        // A header that agrees with the wrong length doesn't help.
        long[2] = long.len() as u8;
        prop_assert_eq!(Message::decode(&long), Err(DecodeError::Length));
    }

    #[test]
    fn a_flipped_byte_is_refused_or_decodes_to_itself(
        message in message(), at in any::<prop::sample::Index>(), flip in 1u8..,
    ) {
        let mut bytes = encoded(&message);
        *at.get_mut(&mut bytes) ^= flip;
        if let Ok(other) = Message::decode(&bytes) {
            prop_assert_eq!(encoded(&other), bytes);
            prop_assert_ne!(other, message);
        }
    }
}

fn sample_endpoint() -> Endpoint {
    let addr = |s: &str| s.parse::<SocketAddr>().expect("an address");
    Endpoint::new(0x1122, addr("127.0.0.1:80"), addr("[2001:db8::5]:40000"))
}

fn sample_greeting() -> Greeting {
    Greeting {
        version: VERSION,
        link_index: 3,
        pid: 4242,
        node: NodeId::from_raw(0x0102_0304_0506_0708).expect("not 0"),
        program: *b"nginx\0\0\0\0\0\0\0\0\0\0\0",
    }
}

const SAMPLE_RMB: RmbToken = RmbToken {
    chunk: 2,
    offset: 0x40000,
    size: 0x40000,
};
const GREETING: &str = "0200030092100000080706050403020 16e67696e780000000000000000000000";
const ENDPOINT: &str = "2211000000000000 00000000000000000000ffff7f000001 \
    20010db8000000000000000000000005 5000 409c";
const RMB: &str = "02000000 00000400 00000400";

/// Every message with its bytes, which must not change while VERSION stays.
#[test]
fn golden() {
    let greeting = sample_greeting();
    let endpoint = sample_endpoint();
    let rmb = SAMPLE_RMB;
    let (slot, generation) = (7, 9);
    let all = [
        (
            Message::Hello {
                greeting,
                control: true,
            },
            format!("01002500 {GREETING} 01"),
            2,
        ),
        (
            Message::Hello {
                greeting,
                control: false,
            },
            format!("01002500 {GREETING} 00"),
            1,
        ),
        (
            Message::HelloAck { greeting },
            format!("02002400 {GREETING}"),
            1,
        ),
        (Message::Bell { index: 0x0102 }, "03000600 0201".into(), 1),
        (
            Message::Chunk {
                index: 5,
                len: 4 << 20,
            },
            "04000c00 05000000 00004000".into(),
            1,
        ),
        (
            Message::Open {
                slot,
                endpoint,
                acceptor_slot: 10,
                acceptor_gen: 11,
                opener_sock: 12,
                rmb,
            },
            format!("05004c00 07000000 {ENDPOINT} 0a000000 0b000000 0c000000 {RMB}"),
            0,
        ),
        (
            Message::Accept { slot, rmb },
            format!("06001400 07000000 {RMB}"),
            0,
        ),
        (
            Message::Decline { slot, reason: 4 },
            "07000900 07000000 04".into(),
            0,
        ),
        (
            Message::Downgrade {
                slot,
                generation,
                pin: 1,
            },
            "08000d00 07000000 09000000 01".into(),
            0,
        ),
        (
            Message::Recall {
                slot,
                generation,
                at: 0x1_0000_0002,
            },
            "09001400 07000000 09000000 0200000001000000".into(),
            0,
        ),
        (
            Message::Nack {
                slot,
                generation,
                what: 6,
            },
            "0a000d00 07000000 09000000 06".into(),
            0,
        ),
        (
            Message::Done {
                slot,
                generation,
                what: 6,
            },
            "0b000d00 07000000 09000000 06".into(),
            0,
        ),
        (
            Message::Ping { seq: 0x01020304 },
            "0c000800 04030201".into(),
            0,
        ),
        (
            Message::Pong { seq: 0x01020304 },
            "0d000800 04030201".into(),
            0,
        ),
        (
            Message::PinEnd {
                endpoint,
                reason: 3,
            },
            format!("0e003100 {ENDPOINT} 03"),
            0,
        ),
        (Message::Left { slot }, "0f000800 07000000".into(), 0),
    ];
    for (message, hex, fds) in all {
        let hex: String = hex.split_whitespace().collect();
        let found: String = encoded(&message)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(found, hex, "{message:?}");
        assert_eq!(message.fds(), fds, "{message:?}");
    }
}

#[test]
fn bad_fields_are_refused() {
    let refused = |message: &Message, at: usize, bytes: &[u8], error: DecodeError| {
        let mut data = encoded(message);
        data[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(Message::decode(&data), Err(error), "{message:?} at {at}");
    };
    let field = DecodeError::Field;
    let hello = Message::Hello {
        greeting: sample_greeting(),
        control: true,
    };
    refused(&hello, 0, &[0], DecodeError::Type(0));
    refused(&hello, 0, &[16], DecodeError::Type(16));
    refused(&hello, 1, &[1], field("header"));
    refused(&hello, 4, &[3, 0], DecodeError::Version(3));
    refused(&hello, 8, &[0; 4], field("pid"));
    refused(&hello, 8, &[0xff; 4], field("pid"));
    refused(&hello, 12, &[0; 8], field("node"));
    refused(&hello, 36, &[2], field("control"));

    let chunk = Message::Chunk {
        index: 0,
        len: CHUNK_MAX,
    };
    for len in [0, 4096, CHUNK_MAX - 1, CHUNK_MAX + PAGE, u32::MAX] {
        refused(&chunk, 8, &len.to_le_bytes(), field("chunk length"));
    }
    let accept = Message::Accept {
        slot: 0,
        rmb: SAMPLE_RMB,
    };
    for size in [0, 8192, 3 << 14, 8 << 20, 1 << 31, u32::MAX] {
        refused(&accept, 16, &size.to_le_bytes(), field("RMB size"));
    }
    for offset in [
        1,
        64,
        CHUNK_MAX - SAMPLE_RMB.size + PAGE,
        u32::MAX - PAGE + 1,
    ] {
        refused(&accept, 12, &offset.to_le_bytes(), field("RMB offset"));
    }
    let pin = Message::PinEnd {
        endpoint: sample_endpoint(),
        reason: 0,
    };
    refused(&pin, 44, &[0, 0], field("port"));
    refused(&pin, 46, &[0, 0], field("port"));
}
