//! Networks of their own for coordinator and workers, with lines between them that can be cut in either direction.
//!
//! One namespace is the hub; everything in it answers on [`HUB`]. Each worker's namespace has a line (a veth pair) to
//! the hub. A direction of a line is cut by giving the sender a wrong hardware address for the other end: packets go
//! out and are dropped on the other side, silently, as with a broken switch. This needs root and iproute2, and nothing
//! of the network that the machine itself uses is touched.

use crate::place::Place;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The address of everything in the hub.
pub const HUB: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1));
/// Nobody has it.
const NOBODY: &str = "02:00:00:00:00:99";

/// Which way packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the worker to the hub.
    Up,
    /// From the hub to the worker.
    Down,
}

/// The namespaces and the lines. Gone when dropped.
pub struct Network {
    prefix: String,
    lines: u8,
}

impl Network {
    /// A hub and this many lines.
    ///
    /// # Errors
    /// Why this machine does not let us.
    pub fn new(lines: u8) -> Result<Self, String> {
        if !nix::unistd::Uid::effective().is_root() {
            return Err("network namespaces need root".to_owned());
        }
        let network = Self {
            prefix: format!("aitk-{}", std::process::id()),
            lines,
        };
        let hub = network.hub_name();
        ip(&["netns", "add", &hub])?;
        ip(&["-n", &hub, "link", "set", "lo", "up"])?;
        ip(&["-n", &hub, "address", "add", &format!("{HUB}/32"), "dev", "lo"])?;
        for line in 1..=lines {
            network.add_line(line)?;
        }
        Ok(network)
    }

    fn add_line(&self, line: u8) -> Result<(), String> {
        let (hub, end) = (self.hub_name(), self.end_name(line));
        let up = format!("line{line}");
        ip(&["netns", "add", &end])?;
        ip(&["-n", &end, "link", "set", "lo", "up"])?;
        #[rustfmt::skip]
        ip(&["-n", &hub, "link", "add", &up, "address", &mac(line, Direction::Up), "type", "veth",
             "peer", "name", "line", "address", &mac(line, Direction::Down), "netns", &end])?;
        for (namespace, device, address) in [(&hub, up.as_str(), 1), (&end, "line", 2)] {
            let address = format!("10.77.{line}.{address}/24");
            ip(&["-n", namespace, "address", "add", &address, "dev", device])?;
            ip(&["-n", namespace, "link", "set", device, "up"])?;
        }
        ip(&["-n", &end, "route", "add", "default", "via", &format!("10.77.{line}.1")])?;
        for direction in [Direction::Up, Direction::Down] {
            self.set(line, direction, true);
        }
        Ok(())
    }

    fn hub_name(&self) -> String {
        format!("{}-hub", self.prefix)
    }

    fn end_name(&self, line: u8) -> String {
        format!("{}-{line}", self.prefix)
    }

    /// Where coordinator and storage run.
    #[must_use]
    pub fn hub(&self) -> Place {
        Place::Network(self.hub_name())
    }

    /// Where the worker at the end of a line runs.
    #[must_use]
    pub fn end(&self, line: u8) -> Place {
        Place::Network(self.end_name(line))
    }

    /// Lets packets through in this direction, or no longer.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn set(&self, line: u8, direction: Direction, whole: bool) {
        let namespace = self.sender(line, direction);
        let mut arguments = vec!["-n".to_owned(), namespace];
        arguments.extend(neighbour(line, direction, whole).split(' ').map(str::to_owned));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        ip(&arguments).expect("the line can be switched");
    }

    fn sender(&self, line: u8, direction: Direction) -> String {
        match direction {
            Direction::Up => self.end_name(line),
            Direction::Down => self.hub_name(),
        }
    }

    /// A bad line: until the guard goes, packets get lost in both directions, in bursts of `lost` out of every `period`.
    ///
    /// # Panics
    /// When the system refuses.
    #[must_use]
    pub fn lossy(&self, line: u8, lost: Duration, period: Duration) -> Loss {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = [Direction::Up, Direction::Down].map(|direction| {
            // One process for all switches: starting one for each would be the slow part.
            let mut switch = Command::new("ip")
                .args(["-n", &self.sender(line, direction), "-force", "-batch", "-"])
                .stdin(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("ip starts");
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    say(&mut switch, &neighbour(line, direction, false));
                    std::thread::sleep(lost);
                    say(&mut switch, &neighbour(line, direction, true));
                    std::thread::sleep(period.saturating_sub(lost));
                }
                drop(switch.stdin.take());
                let _ = switch.wait();
            })
        });
        Loss {
            stop,
            threads: Some(threads),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for line in 1..=self.lines {
            let _ = ip(&["netns", "delete", &self.end_name(line)]);
        }
        let _ = ip(&["netns", "delete", &self.hub_name()]);
    }
}

/// A line that loses packets. Whole again when dropped.
pub struct Loss {
    stop: Arc<AtomicBool>,
    threads: Option<[JoinHandle<()>; 2]>,
}

impl Drop for Loss {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.take().into_iter().flatten() {
            let _ = thread.join();
        }
    }
}

fn say(switch: &mut Child, line: &str) {
    if let Some(pipe) = switch.stdin.as_mut() {
        let _ = writeln!(pipe, "{line}").and_then(|()| pipe.flush());
    }
}

/// The hardware address of the end that packets in this direction arrive at.
fn mac(line: u8, direction: Direction) -> String {
    let end = match direction {
        Direction::Up => 1,
        Direction::Down => 2,
    };
    format!("02:00:00:00:{line:02x}:{end:02x}")
}

/// What the sender of this direction is told about the other end.
fn neighbour(line: u8, direction: Direction, whole: bool) -> String {
    let (address, device) = match direction {
        Direction::Up => (1, "line".to_owned()),
        Direction::Down => (2, format!("line{line}")),
    };
    let mac = if whole { mac(line, direction) } else { NOBODY.to_owned() };
    format!("neighbour replace 10.77.{line}.{address} lladdr {mac} dev {device} nud permanent")
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("ip (iproute2): {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("ip {}: {why}", arguments.join(" ")))
}
