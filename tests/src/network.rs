//! Network namespaces for coordinator and workers, with links that can be cut in either direction.
//!
//! One namespace is the switch; all servers in it have the address [`SWITCH`]. Each worker's namespace has a link (a veth pair) to the
//! switch. A direction of a link is cut by giving the sender a wrong hardware address for the other end: packets are sent and
//! silently dropped at the other end, as with a broken switch. This needs root and iproute2, and does not touch the network of
//! the machine itself.

use crate::namespaces::Namespaces;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The address of all servers in the switch.
pub const SWITCH: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1));
/// A hardware address that no device has.
const UNUSED_MAC: &str = "02:00:00:00:00:99";

/// The direction of packets on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the worker to the switch.
    Up,
    /// From the switch to the worker.
    Down,
}

/// The namespaces and the links. Removed when dropped.
pub struct Network {
    prefix: String,
    links: u8,
}

impl Network {
    /// Creates a switch and this many links, which are numbered from 1.
    ///
    /// # Errors
    /// Why this machine does not permit it.
    pub fn new(links: u8) -> Result<Self, String> {
        if !nix::unistd::Uid::effective().is_root() {
            return Err("network namespaces need root".to_owned());
        }
        let network = Self {
            prefix: format!("aitk-{}", std::process::id()),
            links,
        };
        let switch = network.switch_name();
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "set", "lo", "up"])?;
        ip(&["-n", &switch, "address", "add", &format!("{SWITCH}/32"), "dev", "lo"])?;
        for link in 1..=links {
            network.add_link(link)?;
        }
        Ok(network)
    }

    fn add_link(&self, link: u8) -> Result<(), String> {
        let (switch, end) = (self.switch_name(), self.end_name(link));
        let up = format!("link{link}");
        ip(&["netns", "add", &end])?;
        ip(&["-n", &end, "link", "set", "lo", "up"])?;
        #[rustfmt::skip]
        ip(&["-n", &switch, "link", "add", &up, "address", &mac(link, Direction::Up), "type", "veth",
             "peer", "name", "uplink", "address", &mac(link, Direction::Down), "netns", &end])?;
        for (namespace, device, address) in [(&switch, up.as_str(), 1), (&end, "uplink", 2)] {
            let address = format!("10.77.{link}.{address}/24");
            ip(&["-n", namespace, "address", "add", &address, "dev", device])?;
            ip(&["-n", namespace, "link", "set", device, "up"])?;
        }
        ip(&["-n", &end, "route", "add", "default", "via", &format!("10.77.{link}.1")])?;
        for direction in [Direction::Up, Direction::Down] {
            self.set_link(link, direction, true);
        }
        Ok(())
    }

    fn switch_name(&self) -> String {
        format!("{}-switch", self.prefix)
    }

    fn end_name(&self, link: u8) -> String {
        format!("{}-{link}", self.prefix)
    }

    /// The namespace of coordinator and storage.
    #[must_use]
    pub fn switch(&self) -> Namespaces {
        Namespaces::Network(self.switch_name())
    }

    /// The namespace of the worker at the end of a link.
    #[must_use]
    pub fn worker_end(&self, link: u8) -> Namespaces {
        Namespaces::Network(self.end_name(link))
    }

    /// Lets packets through in this direction, or drops them.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn set_link(&self, link: u8, direction: Direction, is_up: bool) {
        let namespace = self.sender(link, direction);
        let mut arguments = vec!["-n".to_owned(), namespace];
        arguments.extend(neighbour(link, direction, is_up).split(' ').map(str::to_owned));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        ip(&arguments).expect("the link can be switched");
    }

    fn sender(&self, link: u8, direction: Direction) -> String {
        match direction {
            Direction::Up => self.end_name(link),
            Direction::Down => self.switch_name(),
        }
    }

    /// Drops all packets in both directions for `lost` out of every `period`, until the returned guard is dropped.
    ///
    /// # Panics
    /// When the system refuses.
    #[must_use]
    pub fn lose_packets(&self, link: u8, lost: Duration, period: Duration) -> PacketLossGuard {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = [Direction::Up, Direction::Down].map(|direction| {
            // One `ip` process for all changes, because starting one for each would be too slow.
            let mut ip = Command::new("ip")
                .args(["-n", &self.sender(link, direction), "-force", "-batch", "-"])
                .stdin(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("ip starts");
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    write_command(&mut ip, &neighbour(link, direction, false));
                    std::thread::sleep(lost);
                    write_command(&mut ip, &neighbour(link, direction, true));
                    std::thread::sleep(period.saturating_sub(lost));
                }
                drop(ip.stdin.take());
                let _ = ip.wait();
            })
        });
        PacketLossGuard {
            stop,
            threads: Some(threads),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for link in 1..=self.links {
            let _ = ip(&["netns", "delete", &self.end_name(link)]);
        }
        let _ = ip(&["netns", "delete", &self.switch_name()]);
    }
}

/// A link that loses packets. The loss ends when this is dropped.
pub struct PacketLossGuard {
    stop: Arc<AtomicBool>,
    threads: Option<[JoinHandle<()>; 2]>,
}

impl Drop for PacketLossGuard {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.take().into_iter().flatten() {
            let _ = thread.join();
        }
    }
}

fn write_command(ip: &mut Child, command: &str) {
    if let Some(pipe) = ip.stdin.as_mut() {
        let _ = writeln!(pipe, "{command}").and_then(|()| pipe.flush());
    }
}

/// The hardware address of the end that packets in this direction arrive at.
fn mac(link: u8, direction: Direction) -> String {
    let end = match direction {
        Direction::Up => 1,
        Direction::Down => 2,
    };
    format!("02:00:00:00:{link:02x}:{end:02x}")
}

/// The `ip` command that sets the other end's hardware address at the sender of this direction.
fn neighbour(link: u8, direction: Direction, is_up: bool) -> String {
    let (address, device) = match direction {
        Direction::Up => (1, "uplink".to_owned()),
        Direction::Down => (2, format!("link{link}")),
    };
    let mac = if is_up {
        mac(link, direction)
    } else {
        UNUSED_MAC.to_owned()
    };
    format!("neighbour replace 10.77.{link}.{address} lladdr {mac} dev {device} nud permanent")
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("ip (iproute2): {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("ip {}: {stderr}", arguments.join(" ")))
}
