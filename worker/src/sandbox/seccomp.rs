//! Restricts system calls with seccomp.
//!
//! A list of denied calls, not of allowed ones: the libraries of NVIDIA's driver are closed source and differ from
//! version to version. Denied calls fail with "operation not permitted"; no process is killed.
//!
//! What the driver does with calls of the list, as far as public traces show it (NVIDIA/OpenShell issues 1486 and 1696, snapd's profile for
//! `opengl`, sandboxes that run libcuda with the same calls denied):
//!
//! | call | who makes it | when it is denied |
//! |---|---|---|
//! | `socket`, `bind`, `listen` with `AF_UNIX`, `SOCK_SEQPACKET` | `cuInit`: the socket `cuda-uvmfd-…` | `cuInit` fails: allowed |
//! | `memfd_create`, writing `/proc/self/task/TID/comm` | `cuInit` | `cuInit` fails (304): allowed |
//! | `connect` | the multi-process service; `nscd` in glibc | without the service it is not called; glibc reads files instead |
//! | other sockets | nothing in `cuInit`; NCCL | NCCL between processes does not work |
//! | `fork`, `clone` without `CLONE_THREAD`, `execve` | starts `nvidia-modprobe` where a device file is missing | the driver goes on with the device files that exist |
//! | `clone3` | glibc's `pthread_create` | fails with ENOSYS, and glibc uses `clone` |
//! | `mbind`, `set_mempolicy`, `sched_setaffinity`, `mlock`, `eventfd2`, `ioctl` | pinned memory, threads | allowed |
//! | `shmget`, `semget` and others of System V | nothing: CUDA uses `/dev/shm` for IPC and the multi-process service alone | neither works |
//! | `ptrace`, `process_vm_readv`, `kcmp`, `perf_event_open` | debuggers and profilers (CUPTI counters) | they do not work |
//! | `io_uring_setup`, `userfaultfd`, `personality`, `inotify_add_watch` | nothing | |

use aitk_common::capability::DeviceKind;
use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter_all_threads, sock_filter,
};
use std::collections::BTreeMap;

/// Calls of Linux 6.13 and 6.17, which libc does not name yet; new calls have the same number on every architecture.
const SYS_SETXATTRAT: libc::c_long = 463;
const SYS_REMOVEXATTRAT: libc::c_long = 466;
const SYS_FILE_SETATTR: libc::c_long = 469;

/// Commands of `fcntl`, and requests of `ioctl`, that set which process a file sends signals to, and which signal.
const F_SETOWN: u64 = 8;
const F_SETSIG: u64 = 10;
const F_SETOWN_EX: u64 = 15;
const FIOSETOWN: u64 = 0x8901;
const SIOCSPGRP: u64 = 0x8902;

/// Calls that are denied with any arguments: no attempt needs them.
const DENIED_CALLS: &[libc::c_long] = &[
    libc::SYS_execveat,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_tkill,
    // Connecting a socket to another one.
    libc::SYS_connect,
    // Calls that can bypass these rules, or that often have exploitable bugs.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_userfaultfd,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_vmsplice,
    libc::SYS_personality,
    // Modes, owners and attributes by path, which Landlock does not restrict.
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    SYS_SETXATTRAT,
    SYS_REMOVEXATTRAT,
    SYS_FILE_SETATTR,
    // Which files appear in a folder, and their names: Landlock does not restrict who watches it.
    libc::SYS_inotify_add_watch,
    // Memory, messages and semaphores that processes of one user share, and that exist until the system restarts.
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    // Leaving the process group of the attempt, which the daemon kills when the attempt ends.
    libc::SYS_setsid,
    libc::SYS_setpgid,
    // Slowing down other processes of the user.
    libc::SYS_setpriority,
    libc::SYS_ioprio_set,
    // Landlock restricts it only since its third version.
    libc::SYS_truncate,
    // Namespaces and mounts.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    // The machine.
    libc::SYS_acct,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_kexec_load,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_vhangup,
];

/// Starting a program or a process. The driver starts one only to create missing device files, which the daemon's own device
/// probe already did; so only an attempt with an extension may. Elsewhere processes are started with `clone`.
#[cfg(target_arch = "x86_64")]
const STARTING_PROCESSES: &[libc::c_long] = &[libc::SYS_execve, libc::SYS_fork, libc::SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const STARTING_PROCESSES: &[libc::c_long] = &[libc::SYS_execve];

/// Older calls that only this architecture has.
#[cfg(target_arch = "x86_64")]
const DENIED_CALLS_OF_ARCHITECTURE: &[libc::c_long] = &[
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_kexec_file_load,
    libc::SYS_modify_ldt,
    libc::SYS_uselib,
];
#[cfg(not(target_arch = "x86_64"))]
const DENIED_CALLS_OF_ARCHITECTURE: &[libc::c_long] = &[];

/// Denies system calls in this process and all its threads, and in the programs that it starts if it may start some.
///
/// # Errors
/// The reason why the filter could not be installed.
pub(super) fn restrict(device: DeviceKind, starts_programs: bool) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("seccomp: {error}");
    let filters = [
        // seccomp cannot inspect the flags of this call; libraries fall back to `clone` if it does not exist.
        compile_filter(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS),
        denied_calls(device, starts_programs).and_then(|rules| compile_filter(rules, libc::EPERM)),
    ];
    for filter in filters {
        let filter = filter.map_err(|error| failed(&error))?;
        apply_filter_all_threads(&filter).map_err(|error| failed(&error))?;
    }
    Ok(())
}

type CallRules = BTreeMap<i64, Vec<SeccompRule>>;

fn compile_filter(rules: CallRules, errno: i32) -> Result<BpfProgram, seccompiler::BackendError> {
    let deny = SeccompAction::Errno(errno.unsigned_abs());
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        deny.clone(),
        std::env::consts::ARCH.try_into()?,
    )?;
    let mut compiled = BpfProgram::try_from(filter)?;
    if cfg!(target_arch = "x86_64") {
        // The x32 interface has the same calls under other numbers, which the list does not cover.
        compiled.splice(0..0, deny_x32());
    }
    Ok(compiled)
}

/// Instructions that deny calls of the x32 interface: load the number of the call, compare, return.
fn deny_x32() -> [sock_filter; 3] {
    const X32: u32 = 0x4000_0000;
    let deny = u32::from(SeccompAction::Errno(libc::EPERM.unsigned_abs()));
    let instruction = |code: u32, k: u32, jf: u8| sock_filter {
        code: code as u16,
        jt: 0,
        jf,
        k,
    };
    [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, X32, 1),
        instruction(libc::BPF_RET | libc::BPF_K, deny, 0),
    ]
}

fn denied_calls(device: DeviceKind, starts_programs: bool) -> Result<CallRules, seccompiler::BackendError> {
    let starting: &[libc::c_long] = if starts_programs { &[] } else { STARTING_PROCESSES };
    let mut rules: CallRules = DENIED_CALLS
        .iter()
        .chain(DENIED_CALLS_OF_ARCHITECTURE)
        .chain(starting)
        .map(|call| (*call, Vec::new()))
        .collect();
    // Modes and owners of open files: the caches belong to the same user. Libraries of drivers may need these calls.
    if device == DeviceKind::Cpu {
        let by_file = [
            libc::SYS_fchmod,
            libc::SYS_fchown,
            libc::SYS_fsetxattr,
            libc::SYS_fremovexattr,
        ];
        rules.extend(by_file.map(|call| (call, Vec::new())));
    }
    // The condition that argument `index` is not `value`, compared as 32 bits.
    let is_not = |index: u8, value: u64| condition(index, SeccompCmpOp::Ne, value);
    let has = |index: u8, bit: u64| condition(index, SeccompCmpOp::MaskedEq(bit), bit);
    let rule = SeccompRule::new;

    // No sockets. CUDA binds one of its own, to pass memory between its processes; without `connect` it cannot reach
    // others.
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    let mut sockets = Vec::new();
    if device == DeviceKind::Cuda {
        let kind = SeccompCmpOp::MaskedEq(0xf);
        sockets.push(rule(vec![is_not(0, unix)?])?);
        for other in (0..16).filter(|kind| *kind != u64::from(libc::SOCK_SEQPACKET.unsigned_abs())) {
            sockets.push(rule(vec![condition(1, kind.clone(), other)?])?);
        }
    }
    rules.insert(libc::SYS_socket, sockets);
    // A datagram socket of a pair can still send to the path of any other one, without `connect`.
    let mut pairs = vec![rule(vec![is_not(0, unix)?])?];
    for kind in [libc::SOCK_DGRAM, libc::SOCK_RAW] {
        let is_kind = condition(1, SeccompCmpOp::MaskedEq(0xf), u64::from(kind.unsigned_abs()))?;
        pairs.push(rule(vec![is_kind])?);
    }
    rules.insert(libc::SYS_socketpair, pairs);

    // Signals only to itself.
    let own_pid = u64::from(std::process::id());
    for call in [
        libc::SYS_kill,
        libc::SYS_tgkill,
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo,
    ] {
        rules.insert(call, vec![rule(vec![is_not(0, own_pid)?])?]);
    }

    // The owner of an open file gets a signal when the file has data: another way to send any signal to any process.
    let is = |index: u8, value: u64| condition(index, SeccompCmpOp::Eq, value);
    let commands = [F_SETOWN, F_SETSIG, F_SETOWN_EX].map(|command| rule(vec![is(1, command)?]));
    rules.insert(libc::SYS_fcntl, commands.into_iter().collect::<Result<Vec<_>, _>>()?);
    let requests = [FIOSETOWN, SIOCSPGRP].map(|request| rule(vec![is(1, request)?]));
    rules.insert(libc::SYS_ioctl, requests.into_iter().collect::<Result<Vec<_>, _>>()?);

    // Limits only of itself; the daemon belongs to the same user.
    rules.insert(libc::SYS_prlimit64, vec![rule(vec![is_not(0, 0)?])?]);

    // The same of scheduling and CPUs. Libraries of drivers, and those of programs, set them for their threads, whose ids
    // are not known here.
    if device == DeviceKind::Cpu && !starts_programs {
        for call in [
            libc::SYS_sched_setaffinity,
            libc::SYS_sched_setattr,
            libc::SYS_sched_setparam,
            libc::SYS_sched_setscheduler,
        ] {
            rules.insert(call, vec![rule(vec![is_not(0, 0)?])?]);
        }
    }

    // The kernel kills this process when its daemon ends. It may not change that, and has no children, which the kernel
    // would not kill. An attempt with an extension sets the same for its program.
    if !starts_programs {
        let signal_at_end = u64::from(libc::PR_SET_PDEATHSIG.unsigned_abs());
        rules.insert(libc::SYS_prctl, vec![rule(vec![is(0, signal_at_end)?])?]);
    }

    // Threads are allowed, namespaces are not.
    let namespaces = [
        libc::CLONE_NEWCGROUP,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWUTS,
    ];
    let namespaces = namespaces.map(|flag| rule(vec![has(0, u64::from(flag.unsigned_abs()))?]));
    let mut clone = namespaces.into_iter().collect::<Result<Vec<_>, _>>()?;
    if !starts_programs {
        let is_thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
        clone.push(rule(vec![condition(0, SeccompCmpOp::MaskedEq(is_thread), 0)?])?);
    }
    rules.insert(libc::SYS_clone, clone);

    // File times may be set for open files, not by path.
    let by_path = SeccompCondition::new(1, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
    rules.insert(libc::SYS_utimensat, vec![rule(vec![by_path])?]);
    Ok(rules)
}

fn condition(index: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)
}
