/* Where a job's libraries listen: preloaded into the launcher and the ranks, it stands before bind(), listen() and
 * getsockname().
 *
 * LADDERTRON_LISTEN: Open MPI and MPICH bind their sockets to every interface, whatever their own parameters include;
 * here they go to the first of its interfaces (names, commas between) that this host has with an address of the family.
 * Sockets that name an address themselves keep it. One whose family no such interface has goes to loopback: Open MPI
 * gives TCP up altogether where it cannot listen by IPv6.
 *
 * LADDERTRON_PORTS: `low-high`. Sockets that leave the port to the kernel listen on a free one of these (gloo and NCCL
 * have no parameter for it), except on loopback. Those that connect are left alone: Open MPI binds them to an address
 * as well, so a port is chosen only when the socket listens or its name is read. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int (*lt_bind)(int, const struct sockaddr *, socklen_t);
typedef int (*lt_listen)(int, int);
typedef int (*lt_getsockname)(int, struct sockaddr *, socklen_t *);

/* Puts an interface's address in place of the wildcard one; 0 where it has none. */
static int lt_take(const struct ifaddrs *all, const char *name, size_t length, struct sockaddr_storage *address) {
    for (const struct ifaddrs *one = all; one; one = one->ifa_next) {
        if (!one->ifa_addr || one->ifa_addr->sa_family != address->ss_family) continue;
        if (strlen(one->ifa_name) != length || strncmp(one->ifa_name, name, length)) continue;
        if (address->ss_family == AF_INET) {
            ((struct sockaddr_in *)address)->sin_addr = ((struct sockaddr_in *)one->ifa_addr)->sin_addr;
        } else {
            const struct sockaddr_in6 *have = (const struct sockaddr_in6 *)one->ifa_addr;
            ((struct sockaddr_in6 *)address)->sin6_addr = have->sin6_addr;
            ((struct sockaddr_in6 *)address)->sin6_scope_id = have->sin6_scope_id;
        }
        return 1;
    }
    return 0;
}

/* 0 where no interface has such an address: then it is loopback's. */
static int lt_narrow(const char *names, struct sockaddr_storage *address) {
    struct ifaddrs *all = NULL;
    int found = 0;
    if (address->ss_family == AF_INET) ((struct sockaddr_in *)address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else ((struct sockaddr_in6 *)address)->sin6_addr = in6addr_loopback;
    if (getifaddrs(&all) != 0) return 0;
    while (*names && !found) {
        size_t length = strcspn(names, ",");
        found = lt_take(all, names, length, address);
        names += length + (names[length] == ',');
    }
    freeifaddrs(all);
    return found;
}

/* A socket of both families, as torch opens, is met by IPv4 where there is any: it cannot have an address of each. */
static int lt_mapped(int descriptor, const char *names, struct sockaddr_storage *address) {
    struct sockaddr_storage four = {.ss_family = AF_INET};
    struct in6_addr *at = &((struct sockaddr_in6 *)address)->sin6_addr;
    int only = 1;
    socklen_t size = sizeof only;
    if (address->ss_family != AF_INET6 || getsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &only, &size) != 0 || only)
        return 0;
    if (!lt_narrow(names, &four)) return 0;
    at->s6_addr[10] = at->s6_addr[11] = 0xff;
    memcpy(at->s6_addr + 12, &((struct sockaddr_in *)&four)->sin_addr, 4);
    return 1;
}

static int lt_wildcard(const struct sockaddr *address, socklen_t length) {
    if (address && address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in))
        return ((const struct sockaddr_in *)address)->sin_addr.s_addr == htonl(INADDR_ANY);
    if (address && address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6))
        return IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)address)->sin6_addr);
    return 0;
}

static int lt_loopback(const struct sockaddr_storage *address) {
    const struct in6_addr *six = &((const struct sockaddr_in6 *)address)->sin6_addr;
    if (address->ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return IN6_IS_ADDR_LOOPBACK(six) || (IN6_IS_ADDR_V4MAPPED(six) && six->s6_addr[12] == IN_LOOPBACKNET);
}

/* The port's place in an address of either family. */
static in_port_t *lt_port(struct sockaddr_storage *address) {
    return address->ss_family == AF_INET ? &((struct sockaddr_in *)address)->sin_port
                                         : &((struct sockaddr_in6 *)address)->sin6_port;
}

/* The range of ports, where it is for this socket and address: 0 if not. */
static int lt_range(int descriptor, struct sockaddr_storage *address, unsigned *low, unsigned *high) {
    const char *text = getenv("LADDERTRON_PORTS");
    int type = 0;
    socklen_t size = sizeof type;
    if (!text || sscanf(text, "%u-%u", low, high) != 2) return 0;
    if (address->ss_family != AF_INET && address->ss_family != AF_INET6) return 0;
    if (*lt_port(address) != 0 || lt_loopback(address)) return 0;
    return getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

/* Binds to a free port: first to one that no socket has, so that no other process can take it before listen(), then
 * to one that only closed connections have. */
static int lt_place(int descriptor, struct sockaddr_storage *address, socklen_t length, unsigned low, unsigned high) {
    lt_bind next = (lt_bind)dlsym(RTLD_NEXT, "bind");
    char host[256] = "";
    for (int reuse = 0; reuse < 2; reuse++) {
        if (setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse) != 0) return -1;
        for (unsigned port = low; port <= high; port++) {
            *lt_port(address) = htons((in_port_t)port);
            if (next(descriptor, (struct sockaddr *)address, length) == 0) {
                int on = 1; /* its connections, when closed, keep no later launch from the port */
                return setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            }
            if (errno != EADDRINUSE) return -1;
        }
    }
    gethostname(host, sizeof host - 1);
    dprintf(2, "laddertron: %s: no port of launch.port_range=%u-%u is free: enlarge it, or end what listens there\n",
            host, low, high);
    errno = EADDRINUSE;
    return -1;
}

/* Binds as lt_bind does, in the range where there is one: an address that is given gets its port later (lt_settle). */
static int lt_bind_in(int descriptor, struct sockaddr_storage *address, socklen_t length) {
    unsigned low, high;
    int on = 1;
    if (!lt_range(descriptor, address, &low, &high))
        return ((lt_bind)dlsym(RTLD_NEXT, "bind"))(descriptor, (struct sockaddr *)address, length);
    if (!lt_wildcard((struct sockaddr *)address, length) &&
        setsockopt(descriptor, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on) == 0)
        return ((lt_bind)dlsym(RTLD_NEXT, "bind"))(descriptor, (struct sockaddr *)address, length);
    return lt_place(descriptor, address, length, low, high);
}

/* Gives a socket that was bound to an address its port. */
static int lt_settle(int descriptor) {
    struct sockaddr_storage own = {.ss_family = AF_UNSPEC};
    socklen_t length = sizeof own;
    unsigned low, high;
    if (((lt_getsockname)dlsym(RTLD_NEXT, "getsockname"))(descriptor, (struct sockaddr *)&own, &length) != 0) return 0;
    if (!lt_range(descriptor, &own, &low, &high) || lt_wildcard((struct sockaddr *)&own, length)) return 0;
    return lt_place(descriptor, &own, length, low, high);
}

int listen(int descriptor, int backlog) {
    return lt_settle(descriptor) == 0 ? ((lt_listen)dlsym(RTLD_NEXT, "listen"))(descriptor, backlog) : -1;
}

int getsockname(int descriptor, struct sockaddr *address, socklen_t *length) {
    lt_getsockname next = (lt_getsockname)dlsym(RTLD_NEXT, "getsockname");
    return lt_settle(descriptor) == 0 ? next(descriptor, address, length) : -1;
}

int bind(int descriptor, const struct sockaddr *address, socklen_t length) {
    const char *names = getenv("LADDERTRON_LISTEN");
    struct sockaddr_storage own;
    if (!address || length > sizeof own)
        return ((lt_bind)dlsym(RTLD_NEXT, "bind"))(descriptor, address, length);
    memset(&own, 0, sizeof own);
    memcpy(&own, address, length);
    if (!names || !*names || !lt_wildcard(address, length)) return lt_bind_in(descriptor, &own, length);
    if (!lt_mapped(descriptor, names, &own)) lt_narrow(names, &own);
    int done = lt_bind_in(descriptor, &own, length);
    if (done != 0 && errno == EADDRNOTAVAIL && own.ss_family == AF_INET6) {
        /* without even ::1 the host has no address by which anybody could come, but for IPv4's */
        int only = 1;
        if (setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only) != 0) return -1;
        memcpy(&own, address, length);
        return lt_bind_in(descriptor, &own, length);
    }
    return done;
}
