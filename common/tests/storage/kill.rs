//! SIGKILL at any time during a save leaves a complete checkpoint, and saved steps are never lost.

use crate::support::{Random, folder_for_role, reexecute, save};
use aitk_common::checkpoint::Checkpoint;
use std::fs;
use std::time::{Duration, Instant};

const ROLE: &str = "save-in-a-loop";
const KILLS: usize = 30;
const BYTES: usize = 40_000;

/// The child process: continues from the newest checkpoint in an endless loop, and saves every third step twice.
#[test]
fn child() {
    let Some(folder) = folder_for_role(ROLE) else { return };
    let newest = Checkpoint::newest(&folder).unwrap();
    let mut step = newest.map_or(0, |found| found.step());
    loop {
        step += 1;
        save(&folder, step, BYTES);
        if step.is_multiple_of(3) {
            save(&folder, step, BYTES);
        }
        Checkpoint::prune(&folder, 2).unwrap();
    }
}

#[test]
fn a_kill_at_any_time_leaves_a_complete_checkpoint() {
    let place = tempfile::tempdir().unwrap();
    let reference = tempfile::tempdir().unwrap();
    let mut random = Random::new(99);
    let mut last = 0;
    for round in 0..KILLS {
        let mut child = reexecute("kill::child", ROLE, place.path())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // The first round waits until a checkpoint exists.
        let begin = Instant::now();
        while round == 0 && !place.path().join("step_000000001").exists() && begin.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_micros(20_000 + random.below(100_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        let scan = Checkpoint::scan(place.path()).unwrap();
        assert!(scan.rejected.is_empty(), "round {round}: {:?}", scan.rejected);
        let newest = scan
            .newest
            .unwrap_or_else(|| panic!("round {round}: nothing left after step {last}"));
        assert!(newest.step() >= last, "round {round}: {} after {last}", newest.step());
        last = newest.step();
        // The content is that of this step.
        let expected = save(reference.path(), last, BYTES);
        for file in &newest.manifest().files {
            assert_eq!(
                fs::read(newest.folder().join(&file.path)).unwrap(),
                fs::read(expected.join(&file.path)).unwrap()
            );
        }
        let left: Vec<_> = fs::read_dir(place.path())
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        assert!(
            left.iter().all(|name| !name.to_string_lossy().starts_with('.')),
            "round {round}: {left:?}"
        );
    }
    println!("{KILLS} kills, {last} steps");
    assert!(last > KILLS as u64 / 6, "the child saved only {last} steps");
}

#[test]
fn a_reader_does_not_disturb_a_live_writer() {
    use aitk_common::checkpoint::CheckpointWriter;
    let place = tempfile::tempdir().unwrap();
    save(place.path(), 1, 100);
    let mut writer = CheckpointWriter::new(place.path(), 2).unwrap();
    writer.add_bytes("a", "a", b"first").unwrap();
    assert_eq!(Checkpoint::newest(place.path()).unwrap().unwrap().step(), 1);
    writer.add_bytes("b", "b", b"second").unwrap();
    writer.commit(serde_json::Map::new()).unwrap();
    assert_eq!(Checkpoint::newest(place.path()).unwrap().unwrap().step(), 2);
}

#[test]
fn a_checkpoint_that_a_dead_writer_was_replacing_is_restored() {
    let place = tempfile::tempdir().unwrap();
    let folder = save(place.path(), 4, 100);
    fs::rename(&folder, place.path().join(".replaced-step_000000004")).unwrap();
    fs::create_dir(place.path().join(".tmp-step_000000004-dead")).unwrap();
    // The first scan removes the dead writer's folder or restores the old checkpoint; the second scan finds it.
    Checkpoint::newest(place.path()).unwrap();
    assert_eq!(Checkpoint::newest(place.path()).unwrap().unwrap().step(), 4);
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
}
