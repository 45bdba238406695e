//! Open RDMA devices, and what the engine does when one has news.
//!
//! Where the driver can take a device from its users, they get the event `DeviceFatal`. Where it can't (soft-RoCE, iWARP
//! in software), whoever removes the device waits until all users have closed it, and the only sign is that its
//! node in /dev is gone. So that is watched, too.

use std::sync::Arc;

use super::COUNTERS;
use super::run::{EV_DEVICE, Engine, watch};
use crate::fabric::verbs::{self, AsyncEvent, Context, ProtectionDomain};
use crate::observe::Reason;
use crate::wire::Mtu;
use crate::{fds, sys};

/// An open device with its protection domain.
pub(super) struct Device {
    context: Arc<Context>,
    domain: Arc<ProtectionDomain>,
    /// inotify(7) on its node; -1 for none.
    node_watch: i32,
}

impl Device {
    pub(super) fn open(name: &str) -> Result<Device, verbs::Unusable> {
        let context = Context::open(name)?;
        let domain = ProtectionDomain::new(&context)?;
        let node_watch = fds::make_private(|keep| {
            let path = context.node().ok()?;
            sys::watch_links(&path).map(keep).ok()
        });
        Ok(Device {
            context,
            domain,
            node_watch: node_watch.unwrap_or(-1),
        })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    pub(super) fn name(&self) -> &str {
        self.context.name()
    }

    /// The path MTU that a port allows.
    pub(super) fn mtu(&self, port: u8) -> verbs::Result<Mtu> {
        Ok(self.context.port(port)?.mtu)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        fds::close_private(self.node_watch);
    }
}

impl Engine {
    /// Keeps an open device, and watches it. Returns its index.
    pub(super) fn add_device(&mut self, device: Device) -> usize {
        let free = self.devices.iter().position(Option::is_none);
        let i = free.unwrap_or(self.devices.len());
        for fd in [device.context.async_fd(), device.node_watch] {
            let _ = watch(self.epfd, fd, libc::EPOLLIN, EV_DEVICE | i as u64);
        }
        if i == self.devices.len() {
            self.devices.push(None);
        }
        self.devices[i] = Some(device);
        i
    }

    /// A device has news.
    pub(super) fn device_news(&mut self, i: usize) {
        let Some(Some(device)) = self.devices.get(i) else {
            return;
        };
        let mut gone = false;
        if sys::drain(device.node_watch) {
            gone = device.context.node().is_err();
        }
        loop {
            let Some(Some(device)) = self.devices.get(i) else {
                return;
            };
            match device.context.next_event() {
                Ok(None) => break,
                Ok(Some(AsyncEvent::DeviceFatal)) => gone = true,
                Ok(Some(event @ AsyncEvent::QueuePairError(number))) => {
                    log::info!("{}: {event:?}", device.name());
                    self.fail_groups(i, |qpn| qpn == number);
                }
                Ok(Some(event @ AsyncEvent::QueueError)) => {
                    log::info!("{}: {event:?}", device.name());
                    self.fail_groups(i, |_| true);
                }
                // A link survives a port that comes back in time; else it fails by itself.
                Ok(Some(event)) => {
                    log::debug!("{}: {event:?}", device.name());
                    if let AsyncEvent::PortDown(port) = event {
                        for group in self.groups.iter_mut().flatten() {
                            group.port_down(device, port);
                        }
                    }
                }
                Err(e) => {
                    log::warn!("{e}");
                    gone = true;
                    break;
                }
            }
        }
        if gone {
            self.lose_device(i);
        }
    }

    /// The device is being removed: whoever does it may wait for us.
    fn lose_device(&mut self, i: usize) {
        self.fail_groups(i, |_| true);
        let Some(device) = self.devices.get_mut(i).and_then(Option::take) else {
            return;
        };
        log::warn!("RDMA device {} is gone", device.name());
        // Link groups may keep it open for a while.
        for fd in [device.context.async_fd(), device.node_watch] {
            let _ = sys::epoll_ctl(self.epfd, libc::EPOLL_CTL_DEL, fd, None);
        }
    }

    /// Ends the link groups on device `i` whose queue pairs' numbers are `which`.
    fn fail_groups(&mut self, i: usize, which: impl Fn(u32) -> bool) {
        let Some(Some(device)) = self.devices.get(i) else {
            return;
        };
        for group in self.groups.iter_mut().flatten() {
            if group.fail(device, &which) {
                COUNTERS.count(Reason::LinkLost);
            }
        }
    }
}
