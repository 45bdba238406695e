use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Barrier;

use proptest::prelude::*;

use super::super::runtime::tests::TempDir;
use super::*;

fn node(n: u64) -> NodeId {
    NodeId::from_raw(n).expect("not 0")
}

fn endpoint(n: u16) -> Endpoint {
    let local = SocketAddr::from(([127, 0, 0, 1], 80));
    Endpoint::new(4, local, SocketAddr::from(([127, 0, 0, 1], 1000 + n)))
}

fn table() -> Directory {
    Directory::anonymous().expect("memory")
}

#[test]
fn publish_find_withdraw() {
    let table = table();
    let (here, there) = (endpoint(1), endpoint(1).mirror());
    assert_eq!(table.find_mirror(&here), None);
    let first = table.publish(&here, node(1), 10, 100).expect("room");
    assert_eq!(first.duplicate, None);
    assert_eq!(table.find_mirror(&here), None);
    let second = table.publish(&there, node(2), 20, 200).expect("room");
    assert_eq!(
        table.find_mirror(&there),
        Some(Found {
            node: node(1),
            slot: 10,
            slot_gen: 100,
            entry: first.entry
        })
    );
    assert_eq!(
        table.find_mirror(&here).map(|f| f.entry),
        Some(second.entry)
    );
    assert_eq!(table.find_mirror(&endpoint(2)), None);

    assert!(table.is_current(first.entry));
    assert!(table.withdraw(first.entry));
    assert!(!table.is_current(first.entry) && !table.withdraw(first.entry));
    assert_eq!(table.find_mirror(&there), None);
    // The entry has a new owner: an old reference doesn't touch it.
    let third = table.publish(&here, node(1), 11, 101).expect("room");
    assert_eq!(third.entry.index, first.entry.index);
    assert!(!table.withdraw(first.entry) && table.is_current(third.entry));
    assert_eq!(table.owners(), [node(1), node(2)]);
}

#[test]
fn duplicates_are_told() {
    let table = table();
    let first = table.publish(&endpoint(1), node(1), 1, 1).expect("room");
    // The same node may publish an end again; that is not what a duplicate means.
    assert_eq!(
        table
            .publish(&endpoint(1), node(1), 2, 1)
            .expect("room")
            .duplicate,
        None
    );
    let other = table.publish(&endpoint(1), node(2), 3, 1).expect("room");
    assert_eq!(other.duplicate.map(|f| f.entry), Some(first.entry));
    assert_eq!(
        table.find_same(&endpoint(1), node(1)).map(|f| f.slot),
        Some(3)
    );
    assert_eq!(table.find_same(&endpoint(2), node(1)), None);
}

#[test]
fn a_self_connected_socket_has_no_mirror() {
    let table = table();
    let addr = SocketAddr::from(([127, 0, 0, 1], 5000));
    let end = Endpoint::new(4, addr, addr);
    table.publish(&end, node(1), 1, 1).expect("room");
    assert_eq!(table.find_mirror(&end), None);
}

#[test]
fn a_namespace_is_a_world_of_its_own() {
    let table = table();
    let here = endpoint(1);
    table
        .publish(
            &Endpoint {
                netns: 5,
                ..here.mirror()
            },
            node(1),
            1,
            1,
        )
        .expect("room");
    assert_eq!(table.find_mirror(&here), None);
}

#[test]
fn a_full_bucket_says_so_and_recovers() {
    let table = table();
    let entries: Vec<_> = (0..PER_BUCKET as u32)
        .map(|slot| {
            table
                .publish(&endpoint(1), node(1), slot, 0)
                .expect("room")
                .entry
        })
        .collect();
    assert_eq!(
        table.publish(&endpoint(1).mirror(), node(2), 0, 0),
        Err(Full)
    );
    assert!(table.withdraw(entries[3]));
    assert!(table.publish(&endpoint(1).mirror(), node(2), 0, 0).is_ok());
    assert_eq!(table.clear_node(node(1)), PER_BUCKET - 1);
    assert_eq!(table.clear_node(node(1)), 0);
    assert_eq!(table.owners(), [node(2)]);
}

#[test]
fn places_are_a_permutation() {
    let mut places: Vec<_> = (0..ENTRIES).map(place).collect();
    places.sort_unstable();
    assert!(places.into_iter().eq(0..ENTRIES));
}

/// Connections that come and go, 100 at a time, touch only the first parts.
#[test]
fn churn_stays_in_the_first_parts() {
    let table = table();
    for first in (0..6000).step_by(100) {
        for end in first..first + 100 {
            for end in [endpoint(end), endpoint(end).mirror()] {
                table.publish(&end, node(1), 0, 0).expect("room");
            }
        }
        assert_eq!(table.clear_node(node(1)), 200);
    }
    let far = (0..BUCKETS).filter(|b| table.used(Part::far(*b))).count();
    assert!(far < 8, "{far} buckets have touched their second part");
}

/// Leaves `table` as a crash of the publisher after each of its steps would.
#[test]
fn a_crash_at_any_step_is_cleared() {
    let here = endpoint(1);
    let index = bucket_of(&here) * PER_BUCKET;
    for step in 0..4 {
        let table = table();
        table.mark_used(Part::of(index)).expect("memory");
        let entry = table.entry(index);
        assert!(entry.claim(7));
        if step == 1 {
            // Half of the fields.
            table.scribble(Directory::bucket_word(&here) + 3, 99);
        }
        if step >= 2 {
            let generation = entry.fill(7, &encode(&here, 1, 1)).expect("it is ours");
            if step == 3 {
                // Withdrawn, but the owner's id is still there.
                table.scribble(Directory::bucket_word(&here), generation + 1);
            }
        }
        assert_eq!(table.find_mirror(&here.mirror()).is_some(), step == 2);
        assert_eq!(table.owners(), [node(7)]);
        // Nobody else gets at it, and everybody can go on.
        let mine = table.publish(&here, node(8), 2, 2).expect("room");
        assert_eq!(mine.entry.index as usize, index + 1);
        assert_eq!(table.clear_node(node(7)), 1);
        assert_eq!(table.owners(), [node(8)]);
        assert_eq!(
            table.find_mirror(&here.mirror()).map(|f| f.node),
            Some(node(8))
        );
    }
}

#[test]
fn a_wrong_reference_is_harmless() {
    let table = table();
    let entry = table
        .publish(&endpoint(1), node(1), 1, 1)
        .expect("room")
        .entry;
    for wrong in [
        EntryRef {
            index: u32::MAX,
            ..entry
        },
        EntryRef {
            index: ENTRIES as u32,
            ..entry
        },
        EntryRef {
            index: entry.index ^ 1,
            ..entry
        },
        EntryRef {
            index: entry.index ^ 4096,
            ..entry
        },
        EntryRef {
            node: node(2),
            ..entry
        },
        EntryRef {
            generation: entry.generation + 2,
            ..entry
        },
        EntryRef {
            generation: entry.generation & !1,
            ..entry
        },
    ] {
        assert!(
            !table.is_current(wrong) && !table.withdraw(wrong),
            "{wrong:?}"
        );
    }
    assert!(table.is_current(entry));
}

#[test]
fn two_mappings_of_one_file() {
    let tmp = TempDir::new();
    let dir = RuntimeDir::at(tmp.path()).expect("a directory");
    let one = Directory::open(&dir).expect("a table");
    let two = Directory::open(&dir).expect("a table");
    let entry = one
        .publish(&endpoint(1), node(1), 5, 6)
        .expect("room")
        .entry;
    assert_eq!(
        two.find_mirror(&endpoint(1).mirror()).map(|f| f.entry),
        Some(entry)
    );
    let mut seen = Vec::new();
    two.for_each(|end, found| seen.push((end, found.slot, found.slot_gen)));
    assert_eq!(seen, [(endpoint(1), 5, 6)]);
    drop(one);
    assert!(two.withdraw(entry));
    assert_eq!(
        std::fs::read_dir(tmp.path()).expect("a directory").count(),
        1
    );
    // Sparse: the header and one bucket's page, give or take the file system's block size.
    let blocks = std::fs::metadata(dir.file(NAME)).expect("a file").blocks();
    assert!(blocks * 512 < 1 << 20, "{blocks} blocks");
}

#[test]
fn creation_is_race_free() {
    for _ in 0..50 {
        let tmp = TempDir::new();
        let dir = RuntimeDir::at(tmp.path()).expect("a directory");
        let barrier = Barrier::new(4);
        let tables: Vec<_> = std::thread::scope(|scope| {
            let open = || {
                barrier.wait();
                Directory::open(&dir).expect("a table")
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            threads
                .into_iter()
                .map(|t| t.join().expect("no panic"))
                .collect()
        });
        tables[0]
            .publish(&endpoint(1), node(1), 1, 1)
            .expect("room");
        for table in tables {
            assert!(
                table.find_mirror(&endpoint(1).mirror()).is_some(),
                "all map one file"
            );
        }
    }
}

#[test]
fn wrong_files_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let tmp = TempDir::new();
    let dir = RuntimeDir::at(tmp.path()).expect("a directory");
    let path = dir.file(NAME);
    let refused = |what: &str| {
        let error = Directory::open(&dir).expect_err(what);
        assert!(
            matches!(error, RuntimeError::BadDirectory { .. }),
            "{what}: {error}"
        );
    };
    std::fs::write(&path, "").expect("a file");
    refused("empty");
    std::fs::write(&path, vec![0u8; LEN]).expect("a file");
    refused("no header");
    for at in [0, 8, 12, 16, 20, 24, 28] {
        let mut bytes = vec![0u8; LEN];
        bytes[..32].copy_from_slice(&header());
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).expect("a file");
        refused("header");
    }
    let file = File::create(&path).expect("a file");
    init(&file).expect("a table");
    assert!(Directory::open(&dir).is_ok());
    file.set_permissions(std::fs::Permissions::from_mode(0o666))
        .expect("chmod");
    refused("writable by others");
    file.set_permissions(std::fs::Permissions::from_mode(0o600))
        .expect("chmod");
    file.set_len(LEN as u64 + 1).expect("a file");
    refused("size");
    std::fs::remove_file(&path).expect("a file");
    std::fs::create_dir(&path).expect("a directory");
    assert!(Directory::open(&dir).is_err());
    std::fs::remove_dir(&path).expect("a directory");
    std::os::unix::fs::symlink("/dev/zero", &path).expect("a link");
    assert!(Directory::open(&dir).is_err());
}

/// Two nodes publish the two ends at the same time: one or both must find the other, and each finds the truth.
#[test]
fn racing_publishers_find_each_other() {
    const ROUNDS: u32 = 30_000;
    let table = table();
    let barrier = Barrier::new(2);
    let run = |me: u64, end: Endpoint| {
        let mut log = Vec::with_capacity(ROUNDS as usize);
        for round in 0..ROUNDS {
            barrier.wait();
            let published = table.publish(&end, node(me), round, round).expect("room");
            log.push(table.find_mirror(&end));
            barrier.wait();
            assert!(table.withdraw(published.entry));
        }
        log
    };
    let (a, b) = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(2, endpoint(1).mirror()));
        (run(1, endpoint(1)), other.join().expect("no panic"))
    });
    for (round, (a, b)) in a.into_iter().zip(b).enumerate() {
        assert!(a.is_some() || b.is_some(), "round {round}");
        assert!(
            a.is_none_or(|f| f.node == node(2) && f.slot == round as u32 && f.slot_gen == f.slot)
        );
        assert!(
            b.is_none_or(|f| f.node == node(1) && f.slot == round as u32 && f.slot_gen == f.slot)
        );
    }
}

/// The same without barriers between the steps, with two racing for the *same* end, and a sweeper at work.
#[test]
fn churn_never_shows_a_torn_entry() {
    const ROUNDS: u32 = 20_000;
    let table = table();
    let ends = [endpoint(1), endpoint(1).mirror(), endpoint(1)];
    std::thread::scope(|scope| {
        for (me, end) in (1u64..).zip(ends) {
            let table = &table;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let slot = round << 2 | me as u32;
                    let published = table.publish(&end, node(me), slot, !slot).expect("room");
                    for found in [table.find_mirror(&end), published.duplicate]
                        .into_iter()
                        .flatten()
                    {
                        assert_eq!(found.slot, !found.slot_gen);
                        assert_eq!(u64::from(found.slot & 3), found.node.get());
                        let mirror = table.find_mirror(&end).is_none_or(|f| f.node != node(me));
                        assert!(mirror, "found itself");
                    }
                    assert!(table.withdraw(published.entry));
                    if round % 64 == 0 {
                        assert_eq!(table.clear_node(node(99)), 0);
                    }
                }
            });
        }
    });
    assert!(table.owners().is_empty());
}

/// Nodes die with entries of all kinds while others publish in the same bucket and two sweepers race.
#[test]
fn sweepers_spare_the_living() {
    let table = table();
    let end = endpoint(1);
    for round in 0..3000u64 {
        let dead = node(1000 + round);
        for slot in 0..3 {
            table.publish(&end, dead, slot, 0).expect("room");
        }
        assert!(
            table
                .used_entries()
                .any(|(_, entry)| entry.claim(dead.get()))
        );
        let (cleared, kept) = std::thread::scope(|scope| {
            let sweepers = [(); 2].map(|()| scope.spawn(|| table.clear_node(dead)));
            let kept: Vec<_> = (0..8)
                .map(|slot| {
                    table
                        .publish(&end.mirror(), node(1), slot, 0)
                        .expect("room")
                        .entry
                })
                .collect();
            let cleared: usize = sweepers.map(|s| s.join().expect("no panic")).iter().sum();
            (cleared, kept)
        });
        assert_eq!(cleared, 4, "each entry is freed once");
        assert!(kept.into_iter().all(|entry| table.withdraw(entry)));
        assert!(table.owners().is_empty());
    }
}

#[derive(Clone, Debug)]
enum Op {
    Publish { end: u16, mirror: bool, node: u64 },
    Withdraw { which: prop::sample::Index },
    Clear { node: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u16..6, any::<bool>(), 1u64..5)
            .prop_map(|(end, mirror, node)| Op::Publish { end, mirror, node }),
        3 => any::<prop::sample::Index>().prop_map(|which| Op::Withdraw { which }),
        1 => (1u64..5).prop_map(|node| Op::Clear { node }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    /// The table behaves as a map from entry to publication.
    #[test]
    fn like_a_map(ops in prop::collection::vec(op(), 1..120)) {
        let table = table();
        let mut model: HashMap<EntryRef, (Endpoint, NodeId, u32)> = HashMap::new();
        let mut refs = Vec::new();
        for (slot, op) in (0u32..).zip(ops) {
            match op {
                Op::Publish { end, mirror, node: by } => {
                    let end = if mirror { endpoint(end).mirror() } else { endpoint(end) };
                    let in_bucket =
                        model.values().filter(|v| bucket_of(&v.0) == bucket_of(&end)).count();
                    match table.publish(&end, node(by), slot, slot) {
                        Ok(published) => {
                            let others =
                                model.values().any(|v| v.0 == end && v.1 != node(by));
                            prop_assert_eq!(published.duplicate.is_some(), others);
                            let old = model.insert(published.entry, (end, node(by), slot));
                            prop_assert!(old.is_none());
                            refs.push(published.entry);
                        }
                        Err(Full) => prop_assert_eq!(in_bucket, PER_BUCKET),
                    }
                }
                Op::Withdraw { which } => {
                    if !refs.is_empty() {
                        let entry = *which.get(&refs);
                        prop_assert_eq!(table.withdraw(entry), model.remove(&entry).is_some());
                    }
                }
                Op::Clear { node: by } => {
                    let before = model.len();
                    model.retain(|_, v| v.1 != node(by));
                    prop_assert_eq!(table.clear_node(node(by)), before - model.len());
                }
            }
            for end in (0..6).flat_map(|n| [endpoint(n), endpoint(n).mirror()]) {
                let found = table.find_mirror(&end);
                let known = model.values().any(|v| v.0 == end.mirror());
                prop_assert_eq!(found.is_some(), known);
                if let Some(f) = found {
                    prop_assert_eq!(model.get(&f.entry), Some(&(end.mirror(), f.node, f.slot)));
                }
            }
            prop_assert!(refs.iter().all(|r| table.is_current(*r) == model.contains_key(r)));
        }
    }
}
