/* Several nodes on one machine: network, UTS, IPC and mount namespaces around TAP devices, and the switch between them.

   cluster SCRATCH NODES MTU: prints "ready PID", the outside pid of the nodes' init, and switches until stdin ends (its
   owner closed it, or is gone); then removes SCRATCH. All nodes live in one PID namespace whose init is the switch: when
   that goes, however it goes, the kernel kills every process on every node, and namespaces, devices and mounts go too.
   Commands arrive on the SEQPACKET socket SCRATCH/control; see `command` in switch.h. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/ethtool.h>
#include <linux/if_tun.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "switch.h"

#define NET 0x0ad50000u /* 10.213.0.0/24: node i is 10.213.0.(i + 1) */

static int mtu;
static const char *scratch;

static void write_text(const char *path, const char *text, int must) {
    int f = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if ((f < 0 || write(f, text, strlen(text)) < 0) && must) die(path);
    if (f >= 0) close(f);
}

/* ---- one node ---- */

static void ask(int s, unsigned long request, void *argument, const char *what) {
    if (ioctl(s, request, argument) < 0) die(what);
}

static void address(struct sockaddr *to, uint32_t host_order) {
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(host_order)};
    memcpy(to, &in, sizeof in);
}

static void hardware(struct sockaddr *to, int node) {
    const uint8_t mac[6] = {2, 0, 0, 0, 0, (uint8_t)node};
    to->sa_family = ARPHRD_ETHER;
    memcpy(to->sa_data, mac, 6);
}

static void raise_interface(int s, const char *name) {
    struct ifreq r = {0};
    strcpy(r.ifr_name, name);
    r.ifr_flags = IFF_UP | IFF_RUNNING;
    ask(s, SIOCSIFFLAGS, &r, name);
}

/* Inside the node's namespaces: its devices; returns the TAP's fd. */
static int furnish_network(int node) {
    write_text("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1", 0);
    /* As on any tuned cluster; otherwise the window falls back while a prompt is read or a model loads. */
    write_text("/proc/sys/net/ipv4/tcp_slow_start_after_idle", "0", 0);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tap < 0) die("/dev/net/tun");
    struct ifreq r = {0};
    strcpy(r.ifr_name, "eth0");
    r.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    ask(tap, TUNSETIFF, &r, "TUNSETIFF");
    if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) die("segmentation offload");
    int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    hardware(&r.ifr_hwaddr, node);
    ask(s, SIOCSIFHWADDR, &r, "hardware address");
    r.ifr_mtu = mtu;
    ask(s, SIOCSIFMTU, &r, "mtu");
    address(&r.ifr_addr, NET + node + 1);
    ask(s, SIOCSIFADDR, &r, "address");
    address(&r.ifr_netmask, 0xffffff00u);
    ask(s, SIOCSIFNETMASK, &r, "netmask");
    /* A TAP calls itself 10 Mbit/s, and whoever plans by it would believe that. */
    struct ethtool_cmd e = {.cmd = ETHTOOL_SSET, .duplex = DUPLEX_FULL};
    ethtool_cmd_speed_set(&e, 10000);
    r.ifr_data = (void *)&e;
    (void)ioctl(s, SIOCETHTOOL, &r);
    raise_interface(s, "eth0");
    raise_interface(s, "lo");
    for (int other = 0; other < nodes; other++) { /* nobody asks who has which address: the link carries payload only */
        struct arpreq a = {.arp_flags = ATF_PERM | ATF_COM};
        if (other == node) continue;
        address(&a.arp_pa, NET + other + 1);
        hardware(&a.arp_ha, other);
        strcpy(a.arp_dev, "eth0");
        ask(s, SIOCSARP, &a, "neighbour");
    }
    close(s);
    return tap;
}

static void furnish_mounts(void) {
    char hosts[4096];
    snprintf(hosts, sizeof hosts, "%s/hosts", scratch);
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) die("private mounts");
    if (mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=1g") < 0) die("/dev/shm");
    if (mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) die("/sys");
    if (mount(hosts, "/etc/hosts", NULL, MS_BIND, NULL) < 0) die("/etc/hosts");
}

static void send_fd(int s, int fd) {
    char byte = 0, space[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec v = {&byte, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    if (sendmsg(s, &m, 0) != 1) die("passing a device on");
}

static int take_fd(int s) {
    char byte, space[CMSG_SPACE(sizeof(int))];
    struct iovec v = {&byte, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    int fd;
    if (recvmsg(s, &m, MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&m) == NULL) {
        errno = EPIPE;
        die("a node did not come up");
    }
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

/* Forks the process that keeps a node's namespaces; returns the node's TAP. */
static int make_node(int node) {
    int pair[2];
    char path[4096], text[32];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0) die("socketpair");
    pid_t pid = fork();
    if (pid < 0) die("fork");
    if (pid == 0) {
        if (unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNS) < 0) die("unshare");
        snprintf(text, sizeof text, "n%d", node);
        if (sethostname(text, strlen(text)) < 0) die("hostname");
        furnish_mounts();
        send_fd(pair[1], furnish_network(node));
        for (int fd = 0; fd < 64; fd++) close(fd); /* its TAP is the switch's alone, or the device would outlive it */
        for (;;) pause();
    }
    close(pair[1]);
    int tap = take_fd(pair[0]);
    close(pair[0]);
    snprintf(path, sizeof path, "%s/n%d.pid", scratch, node);
    snprintf(text, sizeof text, "%d\n", pid);
    write_text(path, text, 1);
    return tap;
}

/* Which cores a node has, from SCRATCH/nI.cores ("0,2"): its port's thread runs there. */
static void read_cores(int node) {
    char path[4096];
    int core;
    snprintf(path, sizeof path, "%s/n%d.cores", scratch, node);
    FILE *f = fopen(path, "re");
    if (f == NULL) die(path);
    CPU_ZERO(&ports[node].cores);
    while (fscanf(f, "%d%*1[,]", &core) >= 1) {
        CPU_SET(core, &ports[node].cores);
        ports[node].cores_given = 1;
    }
    fclose(f);
}

static void listen_for_commands(void) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s/control", scratch);
    control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (control < 0 || bind(control, (void *)&at, sizeof at) < 0 || listen(control, GUESTS) < 0) die("control socket");
}

static void be_init(int ready) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) die("private mounts");
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) die("/proc");
    for (int i = 0; i < nodes; i++) taps[i] = make_node(i);
    for (int i = 0; i < nodes; i++) read_cores(i);
    listen_for_commands();
    if (write(ready, "r", 1) != 1) die("start");
    run_switch();
}

int main(int argc, char **argv) {
    int gate[2], status;
    char byte;
    if (argc != 4 || (nodes = atoi(argv[2])) < 1 || nodes > MOST || (mtu = atoi(argv[3])) < 576 || mtu > 65521) {
        fprintf(stderr, "usage: cluster SCRATCH NODES(1..%d) MTU(576..65521)\n", MOST);
        return 2;
    }
    scratch = argv[1];
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1);
    if (pipe2(gate, O_CLOEXEC) < 0 || unshare(CLONE_NEWPID | CLONE_NEWNS) < 0) die("unshare");
    pid_t init = fork();
    if (init < 0) die("fork");
    if (init == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(gate[0]);
        close(0);
        be_init(gate[1]);
    }
    close(gate[1]);
    if (read(gate[0], &byte, 1) == 1) { /* else init has said why */
        printf("ready %d\n", init);
        fflush(stdout);
        struct pollfd ends[2] = {{0, POLLIN, 0}, {gate[0], POLLIN, 0}}; /* the owner's, and init's */
        while (poll(ends, 2, -1) < 0 && errno == EINTR) {}
    }
    kill(init, SIGKILL);
    waitpid(init, &status, 0);
    execlp("rm", "rm", "-rf", "--", scratch, NULL);
    return 1;
}
