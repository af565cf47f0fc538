/* Token intervals after a layer's visit: (0, 1], (1, 2], (2, 4], ... (16, 32]. */
#ifndef MOECACHE_INTERVALS_H
#define MOECACHE_INTERVALS_H

enum { MOE_INTERVALS = 6, MOE_HORIZON = 32 };
static const int moe_edge[MOE_INTERVALS + 1] = {0, 1, 2, 4, 8, 16, 32};

#endif
